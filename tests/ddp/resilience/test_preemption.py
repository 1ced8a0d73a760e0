"""A run that is asked to stop saves the step that it has just done, leaves soon, and continues bit for bit."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from common.data.datasets import ImageData
from common.distributed.dist_env import DistEnv
from common.reporting import report
from common.reporting.report import finish
from common.signals.stop_request import INTERRUPTED, REQUEUE, SAME_REQUEST_S
from common.training.evaluation import Evaluation, evaluate
from common.training.metrics import read_metrics
from ddp import train
from ddp.config import TrainConfig
from ddp.data import load_data
from tests.support.harm.kill import STEPS, STEPS_PER_EPOCH, ForkedRun, Run, forked_training, training
from tests.support.harm.left import assert_ends_as, assert_nothing_left, newest_step

pytestmark = pytest.mark.faults

LEAVES_WITHIN_S = 60.0  # on a machine that does something else too; alone it takes 2 to 4, and under torchrun 5 to 7


def stopped(run: ForkedRun, requests: dict[int, int]) -> int:
    """Wait until the run has left, after the signals by rank; returns the step that is saved."""
    statuses = run.exit_statuses(LEAVES_WITHIN_S)
    assert set(statuses) <= {INTERRUPTED, REQUEUE}, run.output
    step, answered = saved_step(run, run.log(0), requests)
    assert set(statuses) == {INTERRUPTED if answered == {signal.SIGINT} else REQUEUE}
    assert_nothing_left(run)
    return step


def saved_step(run: Run, said: str, requests: dict[int, int]) -> tuple[int, set[int]]:
    """The step that the last line about a stop says is saved, which is the newest checkpoint's, and the signals that it
    names: those of the requests that had come by then, which is one at least."""
    pattern = r"stopped by (.*) after step (\d+), which is saved: --resume continues from there"
    who, step = re.findall(pattern, said)[-1]
    sent = {f"{signal.Signals(number).name} on rank {rank}": number for rank, number in requests.items()}
    assert int(step) == newest_step(run.run_dir)
    return int(step), {sent[name] for name in who.split(", ")}


# Four ways to run that change no bit; each is stopped at another moment, by another signal to other ranks.
LINKS: list[tuple[tuple[str, ...], int, dict[int, int]]] = [
    ((), 4, {0: signal.SIGTERM}),
    (("--workers", "1"), 13, {1: signal.SIGUSR1}),
    (("--async-checkpoint", "--checkpoint-every", "1"), 22, {0: signal.SIGINT, 1: signal.SIGINT}),
    (("--strategy", "handwritten", "--all-reduce", "shared-memory"), 40, {1: signal.SIGINT}),
    (("--checkpoint-every", "3"), 50, {0: signal.SIGTERM, 1: signal.SIGINT}),
]


def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """A run that signals stop again and again ends with the bits of an undisturbed one.

    Claim (ddp/resilience/README.md): signals stop all ranks after the same step, which is saved.
    """
    folder = tmp_path / "run"
    for flags, step, requests in LINKS:
        with forked_training(folder, *flags, "--auto-resume") as run:
            done = run.wait_for_step(step)
            for rank, number in requests.items():
                run.send(rank, number)
            sent = run.step()
            assert done <= stopped(run, requests) <= sent + 3
    with forked_training(folder, "--resume") as run:
        assert_ends_as(undisturbed, run)


def ask_in_evaluation() -> None:
    """Rank 1 gets a signal when it begins to evaluate."""

    def asked(network: Any, data: Any, env: DistEnv, *rest: Any) -> Evaluation:
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(network, data, env, *rest)

    mock.patch.object(train, "evaluate", asked).start()


def test_it_stops_in_the_evaluation_which_is_repeated(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    with forked_training(folder, plant=ask_in_evaluation) as run:
        run.wait_for_step(STEPS_PER_EPOCH)
        assert stopped(run, {1: signal.SIGUSR1}) == STEPS_PER_EPOCH
    assert not [record for record in read_metrics(folder) if record["kind"] == "epoch"]
    with forked_training(folder, "--resume") as run:
        assert_ends_as(undisturbed, run)


def ask_while_loading() -> None:
    """Rank 1 gets a signal before there is a run directory."""

    def asked(config: TrainConfig, env: DistEnv) -> ImageData:
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return load_data(config, env)

    mock.patch.object(train, "load_data", asked).start()


def test_a_signal_before_the_first_step_asks_for_another_start(tmp_path: Path) -> None:
    """A signal before the first step asks for another start.

    Claim (ddp/resilience/README.md): a signal before the first step ends the job with status 75 too.
    """
    with forked_training(tmp_path / "run", plant=ask_while_loading) as run:
        assert run.exit_statuses()[1] == REQUEUE


def ask_while_drawing() -> None:
    """Rank 0 gets a signal when it begins to draw the figures."""

    def asked(*arguments: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(*arguments)

    mock.patch.object(report, "finish", asked).start()


def test_a_signal_while_the_figures_are_drawn_changes_nothing(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    """A signal while the figures are drawn changes nothing.

    Claim (ddp/resilience/README.md): a signal while the figures are drawn changes nothing.
    """
    with forked_training(tmp_path / "run", plant=ask_while_drawing) as run:
        assert_ends_as(undisturbed, run)
    assert "SIGTERM came after the last step: the run is complete" in run.log(0)
    assert (run.run_dir / "result.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_process_without_a_job_leaves_with_a_status_that_says_why(tmp_path: Path, number: int) -> None:
    with forked_training(tmp_path / "run", "--model", "mlp", ranks=0) as run:
        done = run.wait_for_step(5)
        run.send(0, number)
        assert done <= stopped(run, {0: number}) < STEPS


def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    """A second signal ends a rank that waits for another.

    Claim (ddp/resilience/README.md): signals stop all ranks after the same step, which is saved.
    """
    with forked_training(tmp_path / "run", "--workers", "1", "--checkpoint-every", "2") as run:
        run.wait_for_step(4)
        run.send(1, signal.SIGSTOP)
        run.send(0, signal.SIGTERM)
        time.sleep(SAME_REQUEST_S + 0.5)
        run.send(0, signal.SIGTERM)
        run.forks[0].join(LEAVES_WITHIN_S)
        assert run.forks[0].exitcode == REQUEUE
        assert newest_step(run.run_dir) >= 2


def test_torchrun_passes_on_what_it_gets_and_what_a_terminal_sends_twice(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    """A signal to torchrun, or to the whole terminal twice, stops all ranks after the same step.

    Claim (ddp/resilience/README.md): signals stop all ranks after the same step, which is saved.
    """
    folder = tmp_path / "run"
    for step, number, flag in ((5, signal.SIGTERM, "--overwrite"), (35, signal.SIGINT, "--resume")):
        with training(folder, flag) as run:
            run.wait_for_step(step)
            if number == signal.SIGTERM:
                run.torchrun.send_signal(number)
            else:
                os.killpg(run.torchrun.pid, number)
            assert run.wait(LEAVES_WITHIN_S) == 1  # whatever its ranks left with
            assert "ddp/train.py" not in run.output  # no rank's traceback
            assert saved_step(run, run.output, {0: number, 1: number})[0] >= step
            assert_nothing_left(run)
    with forked_training(folder, "--resume") as run:
        assert_ends_as(undisturbed, run)
