"""ddp/watchdog/watchdog.py: all other ranks name a rank that hangs; jobs that do not hang go on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from common.distributed.dist_env import DistEnv
from common.files.run_directory import is_written_by_a_run
from ddp.launch.dumps.explain import gathered, report
from ddp.rendezvous.process_group import process_group
from ddp.rendezvous.worker_group import rendezvous
from ddp.watchdog.failure_detector import BEAT_S, Beat, MissingRanks, Position, missing_ranks
from ddp.watchdog.watchdog import IDLE_S, LISTEN_S, TICK_S, Watchdog
from tests.ddp.watchdog.hanging import HANG_STEP, Job, hanging_job
from tests.support.launch import free_port, run_ranks

ALONE = DistEnv.alone(torch.device("cpu"))
TIMEOUT_S = 2.0
SILENT = r"it has given no sign of life for \d+ s \(stopped, or cut off\)"


# Which ranks are missing.

positions = st.tuples(st.integers(0, 2), st.integers(0, 2))
ranks = st.lists(st.tuples(positions, st.booleans(), st.sampled_from(["here", "here", "left"])), min_size=1, max_size=6)


@given(ranks)
def test_silent_ranks_are_missing_or_else_those_furthest_behind(drawn: list[Any]) -> None:
    drawn[0] = (*drawn[0][:2], "here")  # the rank that asks
    now = [Beat(7, Position(position[0], position[1], "data"), state=state) for position, _, state in drawn]
    before = [beat._replace(number=6 + silent) for beat, (_, silent, _) in zip(now, drawn, strict=True)]
    here = {rank: position for rank, (position, _, state) in enumerate(drawn) if state == "here"}
    silent = [rank for rank in here if drawn[rank][1]]
    behind = [rank for rank in here if here[rank] == min(here.values())]
    if silent:
        expected = silent
    elif len(behind) == len(drawn):  # no rank is ahead of them
        expected = []
    else:
        expected = behind
    assert missing_ranks(before, now) == expected


def test_a_rank_that_failed_is_missing() -> None:
    beats = [Beat(7, Position(3, 0, "data"), state=state) for state in ("here", "failed")]
    assert missing_ranks([beats[0]._replace(number=6), beats[1]], beats) == [1]


def test_a_rank_that_finished_its_batches_is_ahead_of_those_that_have_not() -> None:
    watchdog = Watchdog(ALONE, TIMEOUT_S)
    watchdog.at(3, "evaluation")
    during = [watchdog.position for _ in watchdog.each(range(2), "evaluation")]
    assert during[0] == during[1] < watchdog.position < Position(4, 0, "data")


# When a rank is stuck, another has failed, or a stop was requested, by a clock of the test's own.

TWO = DistEnv(0, 0, 2, 2, torch.device("cpu"), "gloo", "host")
FAILED = MissingRanks("data of step 5", {1: "ZeroDivisionError: on purpose"}, failed=True)


class Ended(Exception):
    """The monitor ends the process, with this report."""


class Beats:
    """The heartbeats of rank 0, which asks, and of rank 1, which is ``behind`` and falls silent after ``lives_s``."""

    def __init__(self, scene: Scene, lives_s: float) -> None:
        self.decision: MissingRanks | None = None
        self.set_reading = lambda reading: None
        self.propose = lambda decision: setattr(self, "decision", decision)
        self._scene, self._lives_s = scene, lives_s

    @property
    def latest(self) -> list[Beat]:
        now = self._scene.now
        return [Beat(int(now), Position(5, 1, "backward")), Beat(int(min(now, self._lives_s)), Position(5, 0, "data"))]


class Scene:
    """A rank's monitor and what happens to it, second by second."""

    def __init__(self, env: DistEnv = TWO, timeout_s: float = 60.0, lives_s: float = 1000.0) -> None:
        self.now = 0.0
        self.watchdog = Watchdog(env, timeout_s)
        self.watchdog._names = ["rank 0", "rank 1"]
        self.watchdog.position = Position(5, 1, "backward")
        self.beats = Beats(self, lives_s)
        if env.world_size > 1:
            self.watchdog._beats = self.beats  # type: ignore[assignment]

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def ended(self, until_s: float, at: dict[float, Callable[[], object]] | None = None) -> tuple[float, str] | None:
        """When the process is ended, and with which report; None if it is not.

        :param at: what happens when
        """
        events = sorted((at or {}).items())

        def wait(seconds: float) -> bool:
            self.now += seconds
            while events and events[0][0] <= self.now:
                events.pop(0)[1]()
            return self.now > until_s

        def end(report: str) -> None:
            raise Ended(report)

        self.watchdog._over = mock.Mock(wait=wait)
        with (
            mock.patch("ddp.watchdog.watchdog.time", self),
            mock.patch.object(self.watchdog, "_end", end),
        ):
            try:
                self.watchdog._watch()
            except Ended as ended:
                return self.now, str(ended)
        return None

    def fail_on_rank_1(self) -> None:
        self.beats.decision = FAILED

    def move(self) -> None:
        self.watchdog.at(5, "backward")


def ends_at(scene: Scene, second: float, at: dict[float, Callable[[], object]]) -> None:
    end = scene.ended(2 * second, at)
    assert end is not None and abs(end[0] - second) <= 2 * TICK_S


def test_a_rank_is_stuck_when_it_stays_in_one_place_for_the_timeout() -> None:
    """Every batch is a sign of life."""
    scene = Scene(ALONE, 10.0)
    batches = scene.watchdog.each(range(3), "evaluation")
    ends_at(scene, 37.0, {9.0: scene.move, 18.0: lambda: next(batches), 27.0: lambda: next(batches)})


def test_a_pause_may_take_any_time() -> None:
    scene = Scene(ALONE, 10.0)
    outer, inner = scene.watchdog.paused(), scene.watchdog.paused()
    leave: dict[float, Callable[[], object]] = {50.0: lambda: inner.__exit__(None, None, None)}
    leave[100.0] = lambda: outer.__exit__(None, None, None)
    ends_at(scene, 110.0, {5.0: outer.__enter__, 6.0: inner.__enter__, **leave})


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    scene = Scene(ALONE, 10.0)
    ends_at(scene, 1010.0, {9.0: lambda: setattr(scene, "now", 1009.0)})


@pytest.mark.parametrize("moves", [(), (11.0,), (3.0, 11.0, 15.0)])
def test_a_rank_that_stays_in_one_place_after_another_s_failure_names_it(moves: tuple[float, ...]) -> None:
    scene = Scene()
    end = scene.ended(60.0, {10.0: scene.fail_on_rank_1, **dict.fromkeys(moves, scene.move)})
    assert end is not None
    assert abs(end[0] - max(10.0, *moves, 0.0) - IDLE_S) <= 2 * TICK_S
    failed = "rank 1 failed at data of step 5: ZeroDivisionError: on purpose (its traceback is in its own log); this rank has been"
    assert end[1].startswith(failed)


def test_one_that_moves_or_writes_a_checkpoint_is_left_to_its_own_error() -> None:
    scene = Scene()
    assert scene.ended(40.0, {10.0: scene.fail_on_rank_1, **{float(s): scene.move for s in range(10, 41, 4)}}) is None
    scene = Scene()
    with scene.watchdog.paused():
        assert scene.ended(40.0, {10.0: scene.fail_on_rank_1}) is None


def test_after_a_stop_request_a_silent_rank_is_named() -> None:
    scene = Scene(lives_s=8.0)
    end = scene.ended(60.0, {10.0: lambda: setattr(scene.watchdog, "stop_requested", lambda: True)})
    assert end is not None and end[0] < 10.0 + IDLE_S + LISTEN_S
    assert re.fullmatch(
        r"rank 1 did not arrive in backward of step 5 within 5 s: it has given no sign of life for \d+ s \(stopped, or cut off\)",
        end[1],
    )


def test_after_a_stop_request_a_slow_step_is_waited_for() -> None:
    """After a stop request a slow step is waited for.

    Claim (ddp/resilience/README.md): a failed or killed rank is named within ten seconds; a slow step after a stop request
    is waited for.
    """
    scene = Scene()
    scene.watchdog.stop_requested = lambda: True
    end = scene.ended(90.0)
    assert end is not None and end[0] > 60.0
    assert "rank 1 did not arrive in backward of step 5 within 60 s" in end[1]


def test_a_failed_and_a_killed_rank_are_named_within_ten_seconds() -> None:
    """A failed and a killed rank are named within ten seconds.

    Claim (ddp/resilience/README.md): a failed or killed rank is named within ten seconds; a slow step after a stop request
    is waited for.
    """
    # A tick each until the rank is stuck, the first reading is seen, the decision is proposed, and it is read.
    assert BEAT_S + IDLE_S + 2 * TICK_S <= 10.0
    assert IDLE_S + 4 * TICK_S + LISTEN_S + BEAT_S / 2 <= 10.0


# Jobs that hang.


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    """Jobs that hang in different ways, all at once, since they mostly wait. They have ended when this yields: what was stopped
    is continued when the others have named it."""
    folder = tmp_path_factory.mktemp("hanging")
    with contextlib.ExitStack() as stack:
        started = {}
        for how, timeout_s in (("loop", TIMEOUT_S), ("raise", 600.0), ("kill", 600.0)):
            environments = stack.enter_context(rendezvous(3))
            started[how] = stack.enter_context(hanging_job(folder / how, environments, timeout_s, 1, how))
        environments = environments_of_rank_0s_store(3)
        started["store"] = stack.enter_context(hanging_job(folder / "store", environments, TIMEOUT_S, 0, "stop"))
        environments = stack.enter_context(rendezvous(2))
        started["deadlock"] = stack.enter_context(
            hanging_job(folder / "deadlock", environments, TIMEOUT_S, 0, "deadlock")
        )
        started["kill"].exit_status(1)
        for rank in (0, 2):
            os.kill(started["kill"].processes[rank].pid or 0, signal.SIGTERM)  # as torchrun does
        for job in started.values():
            victim = int(job.wait_for("hanging").read_text())
            for rank, process in enumerate(job.processes):
                if process.pid != victim:
                    job.exit_status(rank)
        os.kill(started["store"].processes[0].pid or 0, signal.SIGCONT)
        for job in started.values():
            for rank in range(len(job.processes)):
                job.exit_status(rank)
        yield started


def environments_of_rank_0s_store(world_size: int) -> list[dict[str, str]]:
    """As a launcher sets them that holds no store: rank 0 does."""
    with rendezvous(world_size) as environments:
        pass
    changes = {"MASTER_PORT": str(free_port()), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return [environment | changes for environment in environments]


def error(job: Job, rank: int) -> str:
    """The one error that the rank logged. An error of a collective may come before it, if a rank that read the decision earlier
    has left."""
    logged = re.findall(r"^\S+ \S+ ERROR .*?\] (.*)$", job.log(rank), re.MULTILINE)
    reports = [line for line in logged if not line.startswith("while a missing rank is looked for: ")]
    assert len(reports) == 1, job.log(rank)
    return str(reports[0])


@pytest.mark.faults
def test_a_rank_in_an_endless_loop_is_named(jobs: dict[str, Job]) -> None:
    """All other ranks name it, and each rank has left its stacks. (Ranks that are stopped: ddp/resilience/test_hangs.py.)"""
    job = jobs["loop"]
    place = (
        rf"rank 1 \(host \S+, pid {job.processes[1].pid}\) did not arrive in backward of step {HANG_STEP} within 2 s"
    )
    stays = rf"it has been at data of step {HANG_STEP} for \d+ s \(its Python stacks are in its own log\)"
    for rank in range(3):
        assert job.exit_status(rank) == 1
        assert f"The Python stacks of rank {rank}" in job.log(rank)
        assert "hanging.py" in job.log(rank)
        if rank != 1:
            assert re.fullmatch(f"{place}: {stays}", error(job, rank))
            assert "in all_reduce" in job.log(rank)
    assert error(job, 1).startswith(f"this rank has been at data of step {HANG_STEP} for ")
    assert "in _hang" in job.log(1)


@pytest.mark.faults
def test_a_store_that_stops_with_its_rank_is_named(jobs: dict[str, Job]) -> None:
    job = jobs["store"]
    pid = (job.folder / "hanging").read_text()
    for rank in (1, 2):
        assert job.exit_status(rank) == 1
        assert re.fullmatch(
            rf"the job's store at MASTER_ADDR 127.0.0.1 does not answer: this host is cut off from it, or rank 0 \(host \S+, "
            rf"pid {pid}\), which holds it, has stopped \(this rank has been at backward of step {HANG_STEP} for \d+ s\)",
            error(job, rank),
        )


@pytest.mark.faults
def test_ranks_that_all_wait_for_each_other_name_no_rank(jobs: dict[str, Job]) -> None:
    for rank in (0, 1):
        assert jobs["deadlock"].exit_status(rank) == 1
        assert error(jobs["deadlock"], rank) == (
            f"all 2 ranks have been at backward of step {HANG_STEP} for 2 s: no rank is behind, so the operation in "
            "which all wait hangs"
        )


@pytest.mark.faults
def test_a_rank_that_failed_unseen_is_named_by_all_others(jobs: dict[str, Job]) -> None:
    """Ranks that wait inside C++ name the rank that failed.

    They wait inside C++ for something that will never come, as for the device on NCCL.

    Claim (ddp/resilience/README.md): a rank that fails or is killed is named by others that wait inside C++.
    """
    failure_is_named(jobs["raise"])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one for each rank of NCCL")
def test_a_rank_that_failed_is_named_by_all_that_wait_for_their_gpu(tmp_path: Path) -> None:
    with (
        rendezvous(2) as environments,
        hanging_job(tmp_path / "job", environments, 600.0, 1, "raise", device="cuda") as job,
    ):
        failure_is_named(job)


def failure_is_named(job: Job) -> None:
    """Rank 1 has failed at data, and the others name it."""
    assert job.exit_status(1) == 1
    assert "ERROR" in job.log(1) and "on purpose" in job.log(1) and "The Python stacks" not in job.log(1)
    for rank in (0, *range(2, len(job.processes))):
        assert job.exit_status(rank) == 1
        assert re.fullmatch(
            rf"rank 1 \(host \S+, pid {job.processes[1].pid}\) failed at data of step {HANG_STEP}: ZeroDivisionError: on purpose "
            rf"\(its traceback is in its own log\); this rank has been at backward of step {HANG_STEP} for \d+ s",
            error(job, rank),
        )
        assert "in _wait_inside_cpp" in job.log(rank)


@pytest.mark.faults
def test_a_rank_that_was_killed_unseen_is_named_by_those_that_get_sigterm(jobs: dict[str, Job]) -> None:
    """A rank that was killed unseen is named by those that get sigterm.

    Claim (ddp/resilience/README.md): a rank that fails or is killed is named by others that wait inside C++.
    """
    job = jobs["kill"]
    for rank in (0, 2):
        assert job.exit_status(rank) == 1
        absence = rf"rank 1 \(host \S+, pid {job.processes[1].pid}\) did not arrive in backward of step {HANG_STEP} within 5 s"
        assert re.fullmatch(rf"{absence}: {SILENT}", error(job, rank))


@pytest.mark.faults
def test_the_latest_collectives_are_written_for_torch_s_own_tool(
    jobs: dict[str, Job], caplog: pytest.LogCaptureFixture
) -> None:
    """When a rank hangs, the latest collectives are written in the format of ``torchfrtrace``.

    Rank 1 was in an endless loop when the others were in the first all-reduce after the barrier.

    Claim (ddp/resilience/README.md): the latest collectives are written for `torchfrtrace`.
    """
    from torch.distributed.flight_recorder import fr_trace  # not at the top: it logs at its import

    (folder,) = re.findall(
        r"INFO .*\] the latest collectives of each rank: torchfrtrace --allow-incomplete-ranks (.*)",
        jobs["loop"].log(0),
    )
    assert sorted(file.name for file in Path(folder).iterdir()) == ["rank0", "rank1", "rank2"]
    assert is_written_by_a_run(f"logs/{Path(folder).relative_to(jobs['loop'].folder)}/rank0")
    with caplog.at_level(logging.INFO):
        fr_trace.main([folder])
    assert "Not all ranks joining collective" in caplog.text
    assert "collective: gloo:all_reduce" in caplog.text and "missing ranks: {1}" in caplog.text
    (verdict,) = (line for line in report(gathered(Path(folder).parents[1])) if line.startswith("group 0"))
    assert "ranks 0, 2 called all_reduce" in verdict and "rank 1 did not: its last there is barrier" in verdict


# Jobs that do not.


@pytest.mark.faults
def test_a_job_that_was_stopped_and_continued_as_a_whole_goes_on(tmp_path: Path) -> None:
    with rendezvous(3) as environments, hanging_job(tmp_path / "job", environments, 10.0) as job:
        job.wait_for("running")
        # Stopped for longer than the timeout, then watched for longer than a decision takes.
        for number, pause_s in ((signal.SIGSTOP, 12.0), (signal.SIGCONT, 22.0)):
            for process in job.processes:
                os.kill(process.pid or 0, number)
            time.sleep(pause_s)
        (job.folder / "end").touch()
        assert [job.exit_status(rank) for rank in range(3)] == [0, 0, 0]


def watched_twice() -> int:
    """How many threads and files are left."""
    with process_group("cpu", threads=1) as env:
        for count in range(2):
            with Watchdog(env, 600.0) as watchdog:
                watchdog.at(1, "data")
            if not count:  # the first round has opened what stays open
                before = left_open()
        return left_open() - before


def test_a_watchdog_leaves_nothing_behind() -> None:
    assert run_ranks(watched_twice, 2) == [0, 0]


def left_open() -> int:
    """Threads and files, once all ranks are here."""
    dist.barrier()
    return threading.active_count() + psutil.Process().num_fds()
