"""ddp/all_reduce/shared_memory.py: it sums as torch does, leaves nothing behind, ends with a lost rank, and refuses what is impossible."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from common.errors import UsageError
from ddp.all_reduce.local_sockets import SECRET_BYTES, _accept, _connect, _new_socket
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.shared_memory import SMALL_BYTES, SharedMemory
from ddp.rendezvous.process_group import process_group
from tests.ddp.all_reduce.test_algorithms import CPU
from tests.support.launch import run_ranks, run_with_victim


def sum_until_killed(victim: int, numel: int) -> str:
    """The victim dies while the others wait for its part of the sum. A process that it forked lives on, as a loader worker may."""
    with process_group(timeout_s=250) as env:
        all_reduce = SharedMemory(P2P())
        buffer = all_reduce.allocate(numel, torch.float32, CPU)
        all_reduce.run(buffer)
        forked = [0]
        if env.rank == victim:
            dying = os.getpid()
            forked = [os.fork()]
            if forked == [0]:
                time.sleep(600)  # the survivors would wait, or time out, if it kept the connections open
                os._exit(0)
            all_reduce._sum_part = lambda buffers: os.kill(dying, signal.SIGKILL)  # type: ignore[method-assign]
        dist.broadcast_object_list(forked, victim)
        with pytest.raises(RuntimeError) as lost:
            all_reduce.run(buffer)
        with contextlib.suppress(ProcessLookupError):
            os.kill(forked[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="is lost"):
            all_reduce.start(buffer).wait()
        all_reduce.close()
        return str(lost.value)


@pytest.mark.faults
def test_survivors_name_the_rank_that_was_killed() -> None:
    """Survivors name the killed rank at once, though a child of it lives on.

    Claim (ddp/all_reduce/README.md): in shared memory, a killed rank ends the others' sums at once.
    """
    (message,) = run_with_victim(sum_until_killed, 2, 0, 100_000).values()
    assert message.startswith("rank 0 is lost: ")


def names_in_use() -> tuple[set[str], bool]:
    """The names of what an all-reduce opens, as the kernel calls it; and whether its memory still exists after its end."""

    def opened() -> set[str]:
        links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
        maps = Path("/proc/self/maps").read_text().splitlines()
        return {os.readlink(link) for link in links if link.is_symlink()} | {
            " ".join(line.split()[5:]) for line in maps
        }

    with process_group(timeout_s=250):
        p2p = P2P()
        before = opened()
        all_reduce = SharedMemory(p2p)
        buffer = all_reduce.allocate(1000, torch.float32, CPU)
        all_reduce.run(buffer)
        new = opened() - before
        all_reduce.close()
        buffer += 1  # the memory of a closed all-reduce is still mapped
        del buffer, all_reduce
        gc.collect()
        return new, any("all-reduce" in name for name in opened())


def test_nothing_has_a_name_that_could_be_left_behind() -> None:
    """Shared memory has no name in the file system.

    Claim (ddp/all_reduce/README.md): nothing in shared memory has a name.
    """
    for names, remains in run_ranks(names_in_use, 2):
        assert "/memfd:all-reduce (deleted)" in names
        assert not [name for name in names if os.path.exists(name)]
        assert not remains


def user_error_of(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as user_error:
        call()
    return str(user_error.value)


def refused() -> dict[str, str]:
    """The message of each user error; all ranks get it, also when one rank made the mistake. Sums go on afterwards."""
    with process_group(timeout_s=250) as env:
        p2p = P2P()
        all_reduce = SharedMemory(p2p)
        messages = {
            "device": user_error_of(lambda: all_reduce.run(torch.zeros(1, device="meta"))),
            "allocated device": user_error_of(lambda: all_reduce.allocate(1, torch.float32, torch.device("meta"))),
            "memory": user_error_of(lambda: all_reduce.allocate(2**50, torch.float32, CPU)),
        }
        if env.rank == 1:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        messages["limit"] = user_error_of(lambda: all_reduce.allocate(2**20, torch.float32, CPU))
        if env.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with mock.patch("sys.platform", "darwin"):
            messages["system"] = user_error_of(lambda: SharedMemory(p2p))
        with mock.patch("socket.gethostname", return_value=f"node-{env.rank // 2}"):
            messages["hosts"] = user_error_of(lambda: SharedMemory(P2P()))
        ones = torch.ones(SMALL_BYTES)
        all_reduce.run(ones)
        assert ones.tolist() == [env.world_size] * SMALL_BYTES
        all_reduce.close()
        return messages


def test_impossible_requests_are_refused_on_all_ranks() -> None:
    first, *others = run_ranks(refused, 3)
    assert others == [{**first, "memory": mock.ANY, "limit": mock.ANY}] * 2
    for device in (first["device"], first["allocated device"]):
        assert device == "an all-reduce by hand sums tensors of the CPU, not of meta: use --all-reduce backend"
    assert f"found no {3 * 2**32:,.1f} MiB of memory on {socket.gethostname()}, which has " in first["memory"]
    assert "found no 12.0 MiB of memory" in first["limit"]
    assert "ulimit -f" in first["limit"]
    assert "Linux" in first["system"]
    assert first["hosts"] == (
        "--all-reduce shared-memory needs all ranks on one host; these are on node-0, node-1: use hierarchical"
    )


def mismatched(numels: list[int]) -> None:
    with process_group(timeout_s=250) as env:
        all_reduce = SharedMemory(P2P())
        with pytest.raises(RuntimeError, match=rf"sum {numels[0]} .* all ranks must all-reduce in the same order"):
            all_reduce.run(torch.zeros(numels[env.rank]))
        all_reduce.close()


@pytest.mark.parametrize("numels", [[3, 4], [100_000, 100_001]])
def test_ranks_that_sum_different_tensors_get_an_error(numels: list[int]) -> None:
    """Ranks that sum different tensors get an error.

    Claim (ddp/all_reduce/README.md): in shared memory, tensors that differ between ranks are an error.
    """
    run_ranks(mismatched, 2, numels)


def test_only_a_process_that_knows_the_secret_is_accepted() -> None:
    secret = bytes(range(SECRET_BYTES))
    with _new_socket(10.0) as listener:
        listener.bind("")
        listener.listen()
        address = listener.getsockname()
        assert address[:1] == b"\0"  # abstract: no file
        wrong, right = address + secret[::-1], address + secret
        with (
            _connect(wrong, 10.0),
            _connect(right, 10.0) as invited,
            _accept(listener, secret) as accepted,
        ):
            invited.send(b"hello")
            assert accepted.recv(100) == b"hello"
