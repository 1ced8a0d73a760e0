"""torch.distributed.checkpoint reads a sharded checkpoint of ours, and a sharded network takes what it has written."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from common.distributed.process_group import process_group
from common.training.gpt import TextModel
from ddp.checkpoint.dcp import PieceReader, load_parameters
from ddp.checkpoint.layout import layout_of
from ddp.checkpoint.pieces import in_memory_order
from ddp.sharded.strategies import FullyShard, shard_network
from ddp.strategies import SHARDED
from tests.ddp.checkpoint.sharded_jobs import TINY, contents, newest, save_each
from tests.support.launch import run_ranks

SIZE = {"vocabulary": 13, "width": TINY["width"], "layers": TINY["layers"], "context": 12}


def read_by_dcp(path: Path) -> dict[str, Tensor]:
    """Into a model of torch's fully_shard, and one of Adam's moments beside it; whole."""
    with process_group(threads=1):
        model = FullyShard(TextModel(**SIZE), None).module
        state = {"model": get_model_state_dict(model)}
        load(state, storage_reader=PieceReader(path))
        moment = {"optimizer": {"state": {"head.weight": {"exp_avg": torch.empty(13, TINY["width"])}}}}
        load(moment, storage_reader=PieceReader(path))
        whole = {name: value.full_tensor() for name, value in state["model"].items() if isinstance(value, DTensor)}
        return {**whole, "exp_avg": moment["optimizer"]["state"]["head.weight"]["exp_avg"]}


def test_dcp_reads_ours(tmp_path: Path) -> None:
    run_ranks(save_each, 2, tmp_path, ["zero3"])
    expected = contents(tmp_path / "zero3-2")
    found = run_ranks(read_by_dcp, 3, newest(tmp_path / "zero3-2").path)[0]
    moment = found.pop("exp_avg")
    assert found.keys() == {name for name in expected if " " not in name}
    assert all(torch.equal(expected[name], value) for name, value in found.items())
    assert any(torch.equal(moment, value) for name, value in expected.items() if name.endswith(" exp_avg"))


def save_by_dcp(folder: Path) -> dict[str, Tensor]:
    """A model of torch's fully_shard; whole."""
    with process_group(threads=1):
        torch.manual_seed(5)
        model = FullyShard(TextModel(**SIZE), None).module
        save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
        return {name: value.full_tensor() for name, value in model.state_dict().items()}


def load_ours(folder: Path, whole: dict[str, Tensor], strategy: str) -> list[str]:
    """Names of parameters of which this rank's part is not the one that was saved, and what else is wrong."""
    with process_group(threads=1) as env:
        torch.manual_seed(env.rank)
        network = shard_network(TextModel(**SIZE), env, strategy)
        read = FileSystemReader.read_metadata
        with mock.patch.object(FileSystemReader, "read_metadata", autospec=True, side_effect=read) as reads:
            load_parameters(network, folder)
        wrong = [] if reads.call_count == 1 else [f"metadata, {reads.call_count} times"]
        for name, part in layout_of(network).items():
            expected = in_memory_order(whole[name], part.place.order)[part.place.begin :][: part.numel]
            own = part.parameter.to_local() if isinstance(part.parameter, DTensor) else part.parameter
            wrong += [] if torch.equal(own.flatten(), expected) else [name]
        plain = TextModel(**SIZE)
        plain.load_state_dict(whole)
        line = torch.tensor([[1, 11, 2, 12, 3]])
        with torch.no_grad():
            wrong += [] if torch.allclose(network(line), plain(line), atol=1e-5) else ["forward"]
        if strategy != "fsdp2":
            network.close()  # type: ignore[operator]
        return wrong


def test_we_read_what_dcp_wrote(tmp_path: Path) -> None:
    whole = run_ranks(save_by_dcp, 2, tmp_path / "dcp")[0]
    for strategy in SHARDED:
        assert run_ranks(load_ours, 3, tmp_path / "dcp", whole, strategy) == [[], [], []]
