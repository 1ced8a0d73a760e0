"""A run that is asked to stop saves the step that it has just done, leaves soon, and continues bit for bit."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from common.data.datasets import ImageData
from common.distributed.process_group import DistEnv
from common.reporting import report
from common.reporting.report import finish
from common.signals.stop_request import INTERRUPTED, REQUEUE, SAME_REQUEST_S
from common.training.evaluation import Evaluation, evaluate
from common.training.metrics import read_metrics
from ddp import train
from ddp.config import TrainConfig
from ddp.data import load_data
from tests.ddp.jobs import assert_identical, final_state
from tests.ddp.resilience.interrupting import (
    FLAGS,
    STEPS,
    STEPS_PER_EPOCH,
    Run,
    litter,
    newest_step,
    processes_of,
    shared_memory,
    shared_memory_left,
    steps_done,
    training,
    wait_for_step,
)
from tests.support.launch import start_command

pytestmark = pytest.mark.faults

LEAVES_WITHIN_S = 60.0  # on a machine that does something else too; alone it takes 2 to 4, and under torchrun 5 to 7


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with training(folder) as run:
        run.finish()
    return folder


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Neither processes nor files, whatever a test does."""
    before = shared_memory()
    yield
    assert not processes_of(tmp_path / "run")
    assert not litter(tmp_path)
    assert not shared_memory_left(before)


def same_run(folder: Path, expected: Path) -> None:
    """The same weights, optimizer and metrics, bit for bit."""
    (tensors, records), (expected_tensors, expected_records) = final_state(folder), final_state(expected)
    assert_identical(tensors, expected_tensors)
    assert records == expected_records


def stopped(run: Run, requests: dict[int, int]) -> int:
    """Wait until the run has left, after the signals by rank; returns the step that is saved."""
    statuses = run.exit_statuses(LEAVES_WITHIN_S)
    assert set(statuses) <= {INTERRUPTED, REQUEUE}, run.output.read_text()
    step, answered = saved_step(run.folder, run.log(0), requests)
    assert set(statuses) == {INTERRUPTED if answered == {signal.SIGINT} else REQUEUE}
    return step


def saved_step(folder: Path, said: str, requests: dict[int, int]) -> tuple[int, set[int]]:
    """The step that the last line about a stop says is saved, which is the newest checkpoint's, and the signals that it
    names: those of the requests that had come by then, which is one at least."""
    pattern = r"stopped by (.*) after step (\d+), which is saved: --resume continues from there"
    who, step = re.findall(pattern, said)[-1]
    sent = {f"{signal.Signals(number).name} on rank {rank}": number for rank, number in requests.items()}
    assert int(step) == newest_step(folder)
    return int(step), {sent[name] for name in who.split(", ")}


# Four ways to run that change no bit; each is stopped at another moment, by another signal to other ranks.
LINKS: list[tuple[tuple[str, ...], int, dict[int, int]]] = [
    ((), 4, {0: signal.SIGTERM}),
    (("--workers", "1"), 13, {1: signal.SIGUSR1}),
    (("--async-checkpoint", "--checkpoint-every", "1"), 22, {0: signal.SIGINT, 1: signal.SIGINT}),
    (("--strategy", "handwritten", "--all-reduce", "shared-memory"), 40, {1: signal.SIGINT}),
    (("--checkpoint-every", "3"), 50, {0: signal.SIGTERM, 1: signal.SIGINT}),
]


def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_bits(tmp_path: Path, undisturbed: Path) -> None:
    """A run that signals stop again and again ends with the bits of an undisturbed one.

    Claim (ddp/resilience/README.md): signals stop all ranks after the same step, which is saved.
    """
    folder = tmp_path / "run"
    for flags, step, requests in LINKS:
        with training(folder, *flags, "--auto-resume") as run:
            done = run.wait_for_step(step)
            for rank, number in requests.items():
                run.send(rank, number)
            sent = steps_done(folder)
            assert done <= stopped(run, requests) <= sent + 3
    with training(folder, "--resume") as run:
        run.finish()
    same_run(folder, undisturbed)


def ask_in_evaluation() -> None:
    """Rank 1 gets a signal when it begins to evaluate."""

    def asked(network: Any, data: Any, env: DistEnv, *rest: Any) -> Evaluation:
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return evaluate(network, data, env, *rest)

    mock.patch.object(train, "evaluate", asked).start()


def test_it_stops_in_the_evaluation_which_is_repeated(tmp_path: Path, undisturbed: Path) -> None:
    folder = tmp_path / "run"
    with training(folder, plant=ask_in_evaluation) as run:
        run.wait_for_step(STEPS_PER_EPOCH)
        assert stopped(run, {1: signal.SIGUSR1}) == STEPS_PER_EPOCH
    assert not [record for record in read_metrics(folder) if record["kind"] == "epoch"]
    with training(folder, "--resume") as run:
        run.finish()
    same_run(folder, undisturbed)


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
    with training(tmp_path / "run", plant=ask_while_loading) as run:
        assert run.exit_statuses()[1] == REQUEUE


def ask_while_drawing() -> None:
    """Rank 0 gets a signal when it begins to draw the figures."""

    def asked(*arguments: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return finish(*arguments)

    mock.patch.object(report, "finish", asked).start()


def test_a_signal_while_the_figures_are_drawn_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    """A signal while the figures are drawn changes nothing.

    Claim (ddp/resilience/README.md): a signal while the figures are drawn changes nothing.
    """
    with training(tmp_path / "run", plant=ask_while_drawing) as run:
        run.finish()
    assert "SIGTERM came after the last step: the run is complete" in run.log(0)
    assert (run.folder / "result.json").exists()
    same_run(run.folder, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_process_without_a_job_leaves_with_a_status_that_says_why(tmp_path: Path, number: int) -> None:
    with training(tmp_path / "run", "--model", "mlp", world_size=0) as run:
        done = run.wait_for_step(5)
        run.send(0, number)
        assert done <= stopped(run, {0: number}) < STEPS


def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    """A second signal ends a rank that waits for another.

    Claim (ddp/resilience/README.md): signals stop all ranks after the same step, which is saved.
    """
    with training(tmp_path / "run", "--workers", "1", "--checkpoint-every", "2") as run:
        run.wait_for_step(4)
        run.send(1, signal.SIGSTOP)
        run.send(0, signal.SIGTERM)
        time.sleep(SAME_REQUEST_S + 0.5)
        run.send(0, signal.SIGTERM)
        run.processes[0].join(LEAVES_WITHIN_S)
        assert run.processes[0].exitcode == REQUEUE
        assert newest_step(run.folder) >= 2


def test_torchrun_passes_on_what_it_gets_and_what_a_terminal_sends_twice(tmp_path: Path, undisturbed: Path) -> None:
    """A signal to torchrun, or to the whole terminal twice, stops all ranks after the same step.

    Claim (ddp/resilience/README.md): signals stop all ranks after the same step, which is saved.
    """
    folder = tmp_path / "run"
    for step, number, flag in ((5, signal.SIGTERM, "--overwrite"), (35, signal.SIGINT, "--resume")):
        command = ("torch.distributed.run", "--nproc_per_node=2", "-m", "ddp.train", *FLAGS, "--run-dir", str(folder))
        with start_command(*command, flag) as torchrun:
            wait_for_step(folder, step)
            if number == signal.SIGTERM:
                torchrun.send_signal(number)
            else:
                os.killpg(torchrun.pid, number)
            _, said = torchrun.communicate(timeout=LEAVES_WITHIN_S)
        assert torchrun.returncode == 1  # whatever its ranks left with
        assert "ddp/train.py" not in said  # no rank's traceback
        assert saved_step(folder, said, {0: number, 1: number})[0] >= step
    with training(folder, "--resume") as run:
        run.finish()
    same_run(folder, undisturbed)
