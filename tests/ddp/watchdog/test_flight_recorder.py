"""ddp/watchdog/flight_recorder.py: the latest collectives, from the recorder of the backend that runs, as torch's tool reads them."""

from __future__ import annotations

import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddp.rendezvous.process_group import process_group
from ddp.watchdog.flight_recorder import write_collectives
from tests.support.launch import run_ranks


@pytest.mark.parametrize(
    ("backend", "recorder", "arguments"),
    [("nccl", "_dump_nccl_trace", {}), ("nccl2", "_dump_fr_trace", {"backend": "nccl2"})],
)
def test_each_implementation_of_nccl_has_its_recorder(
    tmp_path: Path, backend: str, recorder: str, arguments: dict[str, str]
) -> None:
    """The recorder that is read is that of the implementation of NCCL in use.

    torch 2.15 has two that are called NCCL. The recorder of the other one is empty.

    Claim (ddp/resilience/README.md): on NCCL, the collectives come from the recorder of the implementation that runs.
    """
    group, device = mock.Mock(), torch.device("cuda", 0)
    group._get_backend.return_value.name.return_value = backend
    with (
        mock.patch.object(dist, "group", mock.Mock(WORLD=group)),
        mock.patch.object(torch._C._distributed_c10d, recorder, return_value=b"collectives") as dump,
    ):
        write_collectives(tmp_path / "logs", 3, device)
    group._get_backend.assert_called_once_with(device)
    dump.assert_called_once_with(**arguments)
    assert (tmp_path / "logs" / "rank3").read_bytes() == b"collectives"


def on_a_gpu(folder: Path) -> None:
    with process_group("cuda") as env:
        dist.all_reduce(torch.ones(2, device=env.device))
        write_collectives(folder, env.rank, env.device)


@pytest.mark.gpu
def test_the_collectives_of_nccl_are_in_the_recorder_that_is_read(tmp_path: Path) -> None:
    run_ranks(on_a_gpu, 1, tmp_path, fresh=True)
    entries = pickle.loads((tmp_path / "rank0").read_bytes())["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in entries)
