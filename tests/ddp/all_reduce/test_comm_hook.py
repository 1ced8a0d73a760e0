"""ddp/all_reduce/comm_hook.py: torch's DDP averages by our all-reduces, ends with a lost rank, and frees what the hook has."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from common.errors import UsageError
from ddp.all_reduce import ALL_REDUCES, shared_memory_hook
from ddp.all_reduce.comm_hook import average, hook_of
from ddp.by_hand import HandwrittenDistributedDataParallel
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks, run_with_victim


def trained(wrapper: Any, *hook: Any, steps: int = 3) -> Tensor:
    """The weights after some steps, flat."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    model = wrapper(network, bucket_cap_mb=0.1)
    if hook:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    inputs = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        model(torch.randn(4, 8, generator=inputs)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def by_hooks() -> tuple[dict[str, float], dict[str, bool], list[str], int]:
    with process_group(timeout_s=250) as env:
        before = len(os.listdir("/proc/self/fd"))
        expected = trained(DistributedDataParallel)
        off = {
            name: (trained(DistributedDataParallel, *hook_of(name)) - expected).abs().max().item()
            for name in ALL_REDUCES
            if name != "backend"
        }
        same = {}
        if env.world_size == 2:
            same["shared memory"] = torch.equal(trained(DistributedDataParallel, *shared_memory_hook()), expected)
            full = mock.patch.object(torch.UntypedStorage, "_share_fd_cpu_", side_effect=RuntimeError)
            with full if env.rank == 1 else contextlib.nullcontext():
                copied = trained(DistributedDataParallel, *shared_memory_hook())
            same["without room in /dev/shm on one rank"] = torch.equal(copied, expected)
            by_hand = trained(HandwrittenDistributedDataParallel, *shared_memory_hook())
            same["of the DDP by hand"] = torch.equal(by_hand, expected)
            rounded = trained(DistributedDataParallel, None, lambda state, bucket: bf16_compress_hook(None, bucket))  # type: ignore[arg-type]
            in_bf16 = hook_of("shared-memory", dtype=torch.bfloat16)
            same["bf16"] = torch.equal(trained(DistributedDataParallel, *in_bf16), rounded)
            del in_bf16
        gc.collect()
        threads = [thread for thread in threading.enumerate() if "all-reduce" in thread.name]
        for thread in threads:
            thread.join(timeout=10)
        return (
            off,
            same,
            [thread.name for thread in threads if thread.is_alive()],
            len(os.listdir("/proc/self/fd")) - before,
        )


@pytest.mark.parametrize("world_size", [2, 3])
def test_torch_s_ddp_trains_by_each_all_reduce(world_size: int) -> None:
    """torch's DDP trains by each all-reduce, and frees its threads and files.

    Claim (ddp/all_reduce/README.md): as a hook of torch's DDP, shared memory gives its bits on two ranks.
    """
    for off, same, threads, files in run_ranks(by_hooks, world_size):
        assert max(off.values()) < 1e-6, off
        assert all(same.values()), same
        assert threads == []
        assert files <= 0  # the garbage collector may free others' too


def train_until_killed(victim: int) -> str:
    with process_group(timeout_s=250) as env:
        state, hook = shared_memory_hook()

        def dying(state: Any, bucket: Any) -> Any:
            if env.rank == victim and bucket.index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return hook(state, bucket)

        dying.__annotations__ = {}  # DDP refuses those that are strings
        with pytest.raises(RuntimeError) as lost:
            trained(DistributedDataParallel, state, dying)
        return str(lost.value)


@pytest.mark.faults
def test_backward_names_the_rank_that_was_killed() -> None:
    """Backward names the rank that was killed.

    Claim (ddp/all_reduce/README.md): with the hook, a killed rank is named by the others' backward passes.
    """
    for message in run_with_victim(train_until_killed, 3, 1).values():
        assert "rank 1 is lost" in message


def test_gradients_of_another_device_are_refused() -> None:
    bucket: Any = SimpleNamespace(buffer=lambda: torch.empty(3, device="meta"))
    with pytest.raises(UsageError, match="averages gradients on the CPU, not on meta: leave it out there"):
        average(None, bucket)  # type: ignore[arg-type]
