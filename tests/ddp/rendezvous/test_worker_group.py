"""ddp/rendezvous/worker_group.py: calls on the ranks, the errors when one fails, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch

from common.errors import UsageError
from ddp.rendezvous.worker_group import WorkerGroup
from tests.ddp.rendezvous.worker_group_functions import Service
from tests.support.harm.kill import is_alive
from tests.support.launch import start_command, wait_until


@pytest.fixture
def two() -> Iterator[WorkerGroup]:
    with WorkerGroup(2, Service, threads=1) as ranks:
        yield ranks


def pids_of(group: WorkerGroup) -> list[int]:
    """The process ids, in rank order."""
    return [process.pid or 0 for process, _ in group._ranks]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_work_together(world_size: int) -> None:
    with WorkerGroup(world_size, Service, threads=world_size) as ranks:
        expected = [(rank, world_size, pid, "cpu") for rank, pid in enumerate(pids_of(ranks))]
        assert ranks.call("where") == expected
        assert ranks.call("total", 2.0) == [2.0 * sum(range(1, world_size + 1))] * world_size
        assert ranks.call("threads") == [world_size] * world_size
        assert ranks.call("where") == expected  # the same processes


@pytest.mark.gpu
def test_ranks_use_gpus() -> None:
    with WorkerGroup(torch.cuda.device_count(), Service, device="cuda", timeout_s=60) as ranks:
        assert [device for *_, device in ranks.call("where")] == [f"cuda:{rank}" for rank in range(len(pids_of(ranks)))]
        assert ranks.call("total", 1.0) == [sum(range(1, len(pids_of(ranks)) + 1))] * len(pids_of(ranks))


def test_a_call_with_a_time_limit_tells_which_ranks_answered() -> None:
    with WorkerGroup(2, Service, threads=1) as ranks:
        for value in (1.0, 2.0):
            ranks.start("total", value)
            assert ranks.finish_within(60, lambda _: False, 0.1) == {0: 3 * value, 1: 3 * value}
        ranks.start("fail", 1, "sleep")
        assert ranks.finish_within(0.5, lambda _: False, 0.1) == {}
        assert pids_of(ranks) == []
        with pytest.raises(RuntimeError, match="these ranks have ended"):
            ranks.start("where")


def test_after_a_failure_the_others_are_not_waited_for() -> None:
    with WorkerGroup(2, Service, threads=1) as ranks:
        ranks.start("fail", 1, "exit")
        began = time.monotonic()
        answers = ranks.finish_within(60, lambda _: False, 0.1)
        assert time.monotonic() - began < 30
        assert "ended with exit status 7" in str(answers[1])
        assert pids_of(ranks) == []
    with WorkerGroup(2, Service, threads=1) as ranks:
        ranks.start("where")
        assert (
            len(ranks.finish_within(60, lambda place: place[0] == 1, 5.0)) == 2
        )  # both answered, and one is a failure
        assert pids_of(ranks) == []


def test_arrays_are_passed_by_value(two: WorkerGroup) -> None:
    values = np.arange(1 << 20, dtype=np.float32)  # more than a pipe holds
    zero, one = two.call("scaled", values)
    assert not zero["values"].any()
    assert (one["values"] == values).all()


def test_tensors_are_shared() -> None:
    given = torch.zeros(2)
    with WorkerGroup(2, Service, given, threads=1) as ranks:
        given += 10
        passed = torch.zeros(2)
        assert ranks.call("add_rank", passed) == [20, 20]
        assert given.tolist() == [11, 12]
        assert passed.tolist() == [1, 2]
        given.zero_()
        assert ranks.call("add_rank", passed) == [0, 0]
        assert passed.tolist() == [2, 4]
        assert torch.stack(ranks.call("a_tensor")).tolist() == [[0, 0, 0], [1, 1, 1]]


def test_arguments_that_cannot_be_passed_do_no_harm(two: WorkerGroup) -> None:
    with pytest.raises(Exception, match="pickle"):
        two.call("total", lambda: None)
    assert two.call("total", 1.0) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("error", RuntimeError, r"(?s)rank 1 of 2 failed in fail:\nTraceback.*ZeroDivisionError: on purpose"),
        ("mistake", UsageError, r"^--flag 3 is wrong$"),
        ("result", RuntimeError, r"(?s)rank 1 of 2 failed in fail:\nTraceback.*pickle"),
        ("exit", RuntimeError, r"rank 1 of 2 \(pid \d+\) ended with exit status 7 in fail"),
    ],
)
def test_a_failure_on_one_rank_ends_the_call_and_all_ranks(
    two: WorkerGroup, how: str, kind: type[Exception], message: str
) -> None:
    pids = pids_of(two)
    with pytest.raises(kind, match=message):
        two.call("fail", 1, how)
    assert not any(map(psutil.pid_exists, pids))
    with pytest.raises(RuntimeError, match="total: these ranks have ended"):
        two.call("total", 1.0)


def test_a_mistake_in_a_start_is_raised_there() -> None:
    with pytest.raises(UsageError, match=r"^no service on 2$"):
        WorkerGroup(3, Service, None, 2, threads=1)
    with pytest.raises(UsageError, match="--backend nccl needs CUDA"):
        WorkerGroup(2, Service, backend="nccl")
    with pytest.raises(RuntimeError, match=r"(?s)rank \d of 2 failed in build:\nTraceback.*TypeError"):
        WorkerGroup(2, Service, None, None, None, "one too many")


@pytest.mark.parametrize("when", ["before", "in an all-reduce"])
def test_a_rank_that_is_killed_is_named(two: WorkerGroup, when: str) -> None:
    """Also where the others complain about it."""
    pid = pids_of(two)[1]
    if when == "before":
        os.kill(pid, signal.SIGKILL)
        two.start("add_rank", torch.ones(2))
    else:
        two.start("fail", 1, "sleep")
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"rank 1 of 2 \(pid {pid}\) died of SIGKILL \(the kernel"):
        two.finish()


@pytest.mark.parametrize("end", ["close", "a death"])
def test_nothing_is_left_in_this_process(end: str) -> None:
    def job() -> None:
        passed = torch.ones(2)
        with WorkerGroup(2, Service, torch.ones(2), threads=1) as ranks:
            ranks.call("add_rank", passed)
            if end == "a death":
                os.kill(pids_of(ranks)[0], signal.SIGKILL)
                ranks.call("add_rank", passed)

    def traces() -> tuple[int, int, int, list[psutil.Process]]:
        process = psutil.Process()
        shared = sum("torch_" in mapping.path for mapping in process.memory_maps(grouped=False))
        return shared, process.num_fds(), process.num_threads(), process.children(recursive=True)

    with contextlib.suppress(RuntimeError):
        job()  # which starts what multiprocessing keeps
    before = traces()
    with contextlib.suppress(RuntimeError):
        job()
    assert traces() == before


@pytest.mark.faults
def test_no_process_outlives_ctrl_c_or_the_main_process() -> None:
    with start_command("tests.ddp.rendezvous.worker_group_functions") as process:

        def wait_for_sleep() -> list[psutil.Process]:
            assert process.stdout is not None
            below, asleep = process.stdout.readline(), process.stdout.readline()
            assert asleep == "asleep\n", process.communicate()
            return [psutil.Process(int(pid)) for pid in below.split()]

        before = wait_for_sleep()
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all processes
        after = wait_for_sleep()
        assert len(after) == len(before) == 2 + 3  # the fork server, the resource tracker, and three ranks
        assert len(set(before) & set(after)) == 2
        process.kill()
        out, err = process.communicate(timeout=60)
        # A zombie is gone: after a SIGKILL, reaping is the business of the machine's first process.
        wait_until(lambda: not any(map(is_alive, before + after)))
    assert (process.returncode, out, err) == (-signal.SIGKILL, "", "")
