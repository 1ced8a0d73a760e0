"""A rank of ``ddp.train`` that hangs is named by all others, with the step, and all of them end."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import psutil
import pytest
import torch

from common.data.datasets import Batch
from ddp import train
from ddp.job import Job
from tests.support.harm.kill import ForkedRun, forked_training, is_alive
from tests.support.harm.left import assert_nothing_runs

pytestmark = pytest.mark.faults

TIMEOUT_S = 5.0
HANG_AFTER_STEP = 10
NEVER_ENDING = ("--epochs", "1000", "--timeout", str(TIMEOUT_S))


class Case(NamedTuple):
    """A job of which one rank, or its loader worker, is stopped."""

    world_size: int
    victim: int
    worker: bool = False


CASES = {
    "1 of 2": Case(2, 1),
    "1 of 3": Case(3, 1),
    "0 of 2": Case(2, 0),
    "a worker of 1 of 2": Case(2, 1, worker=True),
}


class Hung(NamedTuple):
    """The result of a run that hung; the run has ended, but for a stopped rank that was continued and ended then."""

    run: ForkedRun
    statuses: list[int | None]
    ranks: list[psutil.Process]
    stopped: psutil.Process


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Hung]]:
    """All cases at once, since they mostly wait."""
    folder = tmp_path_factory.mktemp("hung")
    with contextlib.ExitStack() as stack:
        jobs = {}
        for number, (name, case) in enumerate(CASES.items()):
            flags = ("--model", "mlp", *(("--workers", "1") if case.worker else ()), *NEVER_ENDING)
            run = stack.enter_context(forked_training(folder / str(number), *flags, ranks=case.world_size))
            run.wait_for_step(HANG_AFTER_STEP)
            ranks = list(run.ranks().values())
            (stopped,) = run.workers(case.victim) if case.worker else [ranks[case.victim]]
            stopped.suspend()
            jobs[name] = (run, case, ranks, stopped)
        results = {}
        for name, (run, case, ranks, stopped) in jobs.items():
            for rank, fork in enumerate(run.forks):
                if case.worker or rank != case.victim:
                    fork.join(60.0)
            if not case.worker:
                stopped.resume()
            results[name] = Hung(run, run.exit_statuses(30.0), ranks, stopped)
        yield results


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_hangs_is_named_by_all_others(hung: dict[str, Hung], name: str) -> None:
    """The rank that hangs is named by all others.

    Claim (ddp/resilience/README.md): a rank that stops is named by all others, with its stacks in the log.
    """
    case, (run, statuses, ranks, _) = CASES[name], hung[name]
    finding = r"has been at data of step \d+" if case.worker else r"has given no sign of life"
    for rank in range(case.world_size):
        log = run.log(rank)
        assert statuses[rank] == 1
        assert f"The Python stacks of rank {rank} (pid {ranks[rank].pid})" in log
        if rank != case.victim:
            named = (
                rf"rank {case.victim} \(host \S+, pid {ranks[case.victim].pid}\) did not arrive in \w+ of step (\d+)"
            )
            (step,) = re.findall(rf"^\S+ \S+ ERROR .*\] {named} within 5 s: it {finding}", log, re.MULTILINE)
            assert int(step) >= HANG_AFTER_STEP
            assert "in train_step" in log
    assert "] this rank has " in run.log(case.victim)


def test_nothing_is_left_of_them(hung: dict[str, Hung]) -> None:
    for job in hung.values():
        assert not any(
            map(is_alive, (*job.ranks, job.stopped))
        )  # the last is the rank or loader worker that was stopped
        assert_nothing_runs(job.run)


# Replicas that are no replicas.


def corrupt() -> None:
    """One bit of a weight of rank 1 flips after step 7, as in a memory without ECC."""
    train_step = train.train_step

    def corrupting(job: Job, batches: Iterator[Batch]) -> None:
        train_step(job, batches)
        if job.step == 7 and job.env.rank == 1:
            weight = next(job.network.parameters())
            weight.data.view(-1)[3:4].view(torch.int32).bitwise_xor_(1)

    mock.patch.object(train, "train_step", corrupting).start()


def test_a_flipped_bit_ends_the_run_with_the_names_of_tensor_and_rank(tmp_path: Path) -> None:
    """A flipped bit ends the run with the names of tensor and rank.

    Claim (ddp/resilience/README.md): a run ends when its replicas differ, with the names of tensor and rank.
    """
    flags = ("--model", "mlp", "--check-replicas-every", "5")
    with forked_training(tmp_path / "run", *flags, ranks=3, plant=corrupt) as run:
        assert run.exit_statuses(60.0) == [1, 1, 1]
        for rank in range(3):
            found = r"ERROR .* at step 10 the replicas have diverged: parameter '1.weight' differs on rank 1 of 3$"
            assert re.search(found, run.log(rank), re.MULTILINE)
        assert_nothing_runs(run)
