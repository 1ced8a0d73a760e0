"""Stop signals at random moments of a run: no traceback, nothing lost, nothing left, and the next start ends with the right bits."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from common.distributed.worker_group import rendezvous
from tests.adversary.run import start
from tests.support.harm.left import differences, litter, outcome
from tests.support.launch import clean_environment
from tests.support.ranks import kill_tree, run_forked

RUN = (
    "ddp.train", "--device", "cpu", "--threads", "1", "--train-samples", "288", "--test-samples", "64",
    "--batch-size", "48", "--epochs", "2", "--checkpoint-every", "2", "--log-every", "1", "--auto-resume",
)  # fmt: skip
ANSWERS = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
END_S = 60.0

# The last word of the log or the directory tells the phase of the run.
PHASES: tuple[tuple[str, Callable[[Path, str], bool]], ...] = (
    ("exit", lambda folder, log: "of each step waits" in log),
    ("drawing", lambda folder, log: "epoch 2 of 2" in log),
    ("second epoch", lambda folder, log: "epoch 1 of 2" in log),
    ("first epoch", lambda folder, log: "fashion-cnn on glyphs" in log),
    ("model", lambda folder, log: (folder / "run" / "config.json").exists()),
    ("imports, rendezvous and data", lambda folder, log: True),
)

# From the first step on, ranks agree to stop together. Before, a launcher ends them all.
TOGETHER = ("exit", "drawing", "second epoch", "first epoch")


@contextlib.contextmanager
def started(folder: Path, ranks: int, typed: bool, flags: tuple[str, ...]) -> Iterator[list[Any]]:
    """A run in ``folder/run``; all of it is killed at the end.

    :param typed: start Python as a person does, imports and all; else fork with torch imported
    """
    words = [*RUN, *flags, "--run-dir", str(folder / "run")]
    processes: list[Any] = []
    with contextlib.ExitStack() as stack:
        environments: list[dict[str, str]] = stack.enter_context(rendezvous(ranks)) if ranks > 1 else [{}]
        try:
            for rank, environment in enumerate(environments):
                out, err, memory = (folder / f"{name}{rank}" for name in ("stdout", "stderr", "bytes"))
                if typed:
                    with open(out, "w") as stdout, open(err, "w") as stderr:
                        env: Mapping[str, str] = clean_environment() | environment
                        command = [sys.executable, "-m", *words]
                        processes.append(subprocess.Popen(command, stdout=stdout, stderr=stderr, env=env))
                else:
                    processes.append(start(words, environment, folder, "kept", (out, err, memory)))
            yield processes
        finally:
            for process in processes:
                kill_tree(process.pid)
                process.wait() if typed else process.join()


def status_of(process: Any) -> int | None:
    """None while it lives."""
    if isinstance(process, subprocess.Popen):
        return process.poll()
    return None if process.is_alive() else int(process.exitcode)


def log_of(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.glob("std*")))


def stop(folder: Path, processes: list[Any], victims: list[int], number: int, after_s: float) -> tuple[str, list[int]]:
    """Send a signal to these ranks after a while; the phase that it met, and the statuses. As torchrun does, end the other
    ranks when one has ended."""
    while len(list(folder.glob("stderr?"))) < len(processes):  # a fork hears signals from here on
        time.sleep(0.01)
    time.sleep(after_s)
    log = log_of(folder)
    phase = next(name for name, is_it in PHASES if is_it(folder, log))
    if phase not in TOGETHER:  # the others learn only from a collective that this rank has gone
        victims = list(range(len(processes)))
    for rank in victims:
        with contextlib.suppress(ProcessLookupError):
            if status_of(processes[rank]) is None:
                os.kill(processes[rank].pid, number)
    deadline, told = time.monotonic() + END_S, False
    while None in map(status_of, processes):
        assert time.monotonic() < deadline, f"still running {END_S} s after the signal, in {phase}:\n{log_of(folder)}"
        if not told and any(status_of(process) is not None for process in processes):
            time.sleep(1.0)
            for process in processes:
                if status_of(process) is None:
                    os.kill(process.pid, signal.SIGTERM)
            told = True
        time.sleep(0.02)
    return phase, [status_of(process) or 0 for process in processes]


def disturbed(folder: Path, seed: int, whole: dict[int, tuple[float, dict[str, Any]]]) -> str:
    """A run that gets a signal, and the next one that goes on; returns the phase that the signal met.

    :param whole: by number of ranks, how long an undisturbed run takes, and what it comes to
    """
    random_ = random.Random(seed)
    ranks, typed = random_.choice((1, 1, 2)), random_.random() < 0.3
    flags = ("--async-checkpoint",) if random_.random() < 0.3 else ()
    number = random_.choice(list(ANSWERS))
    victims = list(range(ranks)) if number == signal.SIGINT or random_.random() < 0.5 else [random_.randrange(ranks)]
    took, expected = whole[ranks]
    # The imports take seconds, and Python itself a moment, in which nobody can hear.
    moment = random_.random() * (took + 4.0 * typed) + 1.0 * typed
    with started(folder, ranks, typed, flags) as processes:
        phase, statuses = stop(folder, processes, victims, number, moment)
    said = log_of(folder)
    case = f"seed {seed}: {signal.Signals(number).name} to {victims} of {ranks} after {moment:.2f} s, in {phase}: {statuses}"
    assert "Traceback" not in said, f"{case}\n{said}"
    answers = {0, ANSWERS[signal.Signals(number)]}
    if ranks > 1:
        answers.add(ANSWERS[signal.SIGTERM])  # sent to those that are left
    if not (folder / "run").exists():
        answers.add(-number)  # Python itself had not started, on one rank or all
    assert set(statuses) <= answers, f"{case}\n{said}"
    for done in run_forked(*RUN, *flags, "--run-dir", folder / "run", world_size=ranks if ranks > 1 else 0):
        assert done.returncode == 0, f"{case}\n{said}\nand then\n{done.stderr}"
    assert differences(folder / "run", expected) == [], case
    assert litter(folder / "run") == [], case
    assert (folder / "run" / "result.json").exists(), case
    return phase


def check(folder: Path, seeds: range) -> None:
    """Disturb a run for each seed, and print how many signals met each phase."""
    whole: dict[int, tuple[float, dict[str, Any]]] = {}
    for ranks in (1, 2):
        began = time.monotonic()
        with started(_made(folder / str(ranks)), ranks, False, ()) as processes:
            while None in map(status_of, processes):
                time.sleep(0.02)
        assert {status_of(process) for process in processes} == {0}, log_of(folder / str(ranks))
        whole[ranks] = time.monotonic() - began, outcome(folder / str(ranks) / "run")
    phases = Counter(disturbed(_made(folder / f"seed-{seed}"), seed, whole) for seed in seeds)
    print(dict(phases))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.adversary
@pytest.mark.timeout(900)
def test_signals_at_random_moments(tmp_path: Path) -> None:
    """Twelve runs that get a signal at a random moment end as documented and resume to the right bits.

    Claim (README.md): signals at random moments lose nothing.
    """
    check(tmp_path, range(12))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", [1000, 1100])
def test_two_hundred_signals_at_random_moments(tmp_path: Path, first: int) -> None:
    """Two hundred runs that get a signal at a random moment end as documented and resume to the right bits.

    Claim (README.md): two hundred signals at random moments lose nothing.
    """
    check(tmp_path, range(first, first + 100))
