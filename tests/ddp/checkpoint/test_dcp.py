"""torch.distributed.checkpoint reads what we export, and we import what it has written; both by the command."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from common.distributed.process_group import process_group
from common.training.gpt import TextModel
from ddp.checkpoint import __main__ as checkpoint
from ddp.sharded.fully_shard import FullyShard
from tests.ddp.checkpoint.sharded_jobs import TINY, contents, resume_each, save_each
from tests.ddp.checkpoint.test_command import call
from tests.support.launch import run_ranks
from tests.support.user_errors import UserError

SIZE = {"vocabulary": 13, "width": TINY["width"], "layers": TINY["layers"], "context": 12}
NAMES = [name for name, _ in TextModel(**SIZE).named_parameters()]


def in_torch_s_own_job(folder: Path, saves: bool) -> dict[str, Tensor]:
    """Save by ``dcp.save``, or load by ``dcp.load``, with ``fully_shard`` and AdamW after a step; the tensors, whole."""
    with process_group(threads=1) as env:
        torch.manual_seed(5)
        model = FullyShard(TextModel(**SIZE), None, env.device).module
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.tensor([[1, 11, 2, 12, 3]])).sum().backward()
        optimizer.step()
        weights, of_optimizer = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": {"state": of_optimizer["state"]}}
        if saves:
            save(state, checkpoint_id=folder)
        else:
            load(state, checkpoint_id=folder)
            settings = {"state": state["optimizer"]["state"], "param_groups": of_optimizer["param_groups"]}
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=settings)
            weights, of_optimizer = get_state_dict(model, optimizer)
        of_state: dict[str, Any] = of_optimizer["state"]  # type: ignore[assignment]
        everything: dict[str, Any] = {f"model.{n}": v for n, v in weights.items()}
        for name, own in of_state.items():
            everything |= {f"optimizer.{NAMES.index(name)}.{key}": v for key, v in own.items()}
        return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in everything.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []


def test_dcp_and_we_read_each_other_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_error: UserError, capsys: pytest.CaptureFixture[str]
) -> None:
    """``torch.distributed.checkpoint`` reads what we export, and we import what it has written.

    Claim (ddp/sharded/README.md, 9): `torch.distributed.checkpoint` reads ours, and we its.
    """
    run_ranks(save_each, 2, tmp_path, ["torch", "zero3"])
    command = functools.partial(call, monkeypatch, capsys)
    for run in ("torch-2", "zero3-2"):
        output = tmp_path / f"dcp-{run}"
        command("export", "--format", "dcp", "--run-dir", tmp_path / run, "--output", output)
        assert_same(run_ranks(in_torch_s_own_job, 3, output, False)[0], contents(tmp_path / run))

    written = run_ranks(in_torch_s_own_job, 2, tmp_path / "theirs", True)[0]
    for run in ("torch-2", "zero3-2"):
        output = tmp_path / f"from-{run}"
        command("import", "--input", tmp_path / "theirs", "--run-dir", tmp_path / run, "--output", output)
        assert_same(contents(output), written)
    [resumed] = run_ranks(resume_each, 3, tmp_path, ["from-zero3-2"], ["zero2"])[:1]
    assert resumed["from-zero3-2", "zero2"].differences == []

    def refusal(command: str, *arguments: str | Path) -> str:
        return user_error(checkpoint.main, command, "--run-dir", tmp_path / "torch-2", *arguments)

    there, new = tmp_path / "theirs", tmp_path / "new"
    assert f"--output {there} is there already" in refusal("export", "--format", "dcp", "--output", there)
    assert f"--output {there} is there already" in refusal("import", "--input", there, "--output", there)
    assert f"--input {tmp_path} holds no .metadata" in refusal("import", "--input", tmp_path, "--output", new)
    with pytest.warns(UserWarning, match="single process"):
        save({"model": {"other": torch.ones(1)}}, checkpoint_id=tmp_path / "other", no_dist=True)
    line = refusal("import", "--input", tmp_path / "other", "--output", new)
    assert f"--input {tmp_path / 'other'} does not fit " in line and "Missing key" in line
    assert not new.exists()
