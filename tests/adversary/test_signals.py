"""Stop signals at random moments of a run: no traceback, nothing lost, nothing left, and the next start ends with the right bits."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.harm.kill import Run, forked_training, kill, training
from tests.support.harm.left import assert_ends_as, outcome

ANSWERS = {signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
END_S = 60.0

# The last word of the output or the directory tells the phase of the run.
PHASES: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("exit", lambda run: "of each step waits" in run.output),
    ("drawing", lambda run: "epoch 2 of 2" in run.output),
    ("second epoch", lambda run: "epoch 1 of 2" in run.output),
    ("first epoch", lambda run: "fashion-cnn on glyphs" in run.output),
    ("model", lambda run: (run.run_dir / "config.json").exists()),
    ("imports, rendezvous and data", lambda run: True),
)

# From the first step on, ranks agree to stop together. Before, a launcher ends them all.
TOGETHER = ("exit", "drawing", "second epoch", "first epoch")


def stop(run: Run, victims: list[int], number: int) -> tuple[str, list[int | None]]:
    """Send a signal to these ranks; the phase that it met, and the statuses. As torchrun does, end the other ranks when one
    has ended."""
    phase = next(name for name, is_it in PHASES if is_it(run))
    ranks = run.ranks()
    if phase in TOGETHER:  # else the others learn only from a collective that this rank has gone
        ranks = {rank: process for rank, process in ranks.items() if rank in victims}
    before = len(run.ranks())
    kill(ranks.values(), number)
    run.until(lambda: len(run.ranks()) < before, END_S)
    time.sleep(1.0)
    kill(run.ranks().values(), signal.SIGTERM)
    return phase, run.exit_statuses(END_S)


def disturbed(folder: Path, seed: int, whole: dict[int, tuple[float, dict[str, Any]]]) -> str:
    """A run that gets a signal, and the next one that goes on; returns the phase that the signal met.

    :param whole: by number of ranks (0: of no job), how long an undisturbed run takes, and what it comes to
    """
    random_ = random.Random(seed)
    ranks = random_.choice((0, 0, 2))
    typed = not ranks and random_.random() < 0.4  # Python started as a person does, imports and all
    flags = ("--auto-resume", *(("--async-checkpoint",) if random_.random() < 0.3 else ()))
    number = random_.choice(list(ANSWERS))
    victims = [0, 1] if number == signal.SIGINT or random_.random() < 0.5 else [random_.randrange(2)]
    if not ranks:
        victims = [0]
    took, expected = whole[ranks]
    # The imports take seconds, and Python itself a moment, in which nobody can hear.
    moment = random_.random() * (took + 4.0 * typed) + 1.0 * typed
    run_dir = folder / "run"
    with (
        training(run_dir, *flags, ranks=0) if typed else forked_training(run_dir, *flags, ranks=ranks, figures=True)
    ) as run:
        run.until(run.hears_signals)
        time.sleep(moment)
        phase, statuses = stop(run, victims, number)
        case = f"seed {seed}: {number.name} to {victims} of {ranks} after {moment:.2f} s, in {phase}: {statuses}\n{run.output}"
        assert "Traceback" not in run.output, case
        answers = {0, ANSWERS[number]}
        if ranks:
            answers.add(ANSWERS[signal.SIGTERM])  # sent to those that are left
        if not run_dir.exists():
            answers.add(-number)  # Python itself had not started, on one rank or all
        assert set(statuses) <= answers, case
    with forked_training(run_dir, *flags, ranks=ranks) as again:
        assert_ends_as(expected, run, again)
        assert (run_dir / "result.json").exists(), case
    return phase


def check(folder: Path, seeds: range) -> None:
    """Disturb a run for each seed, and print how many signals met each phase."""
    whole: dict[int, tuple[float, dict[str, Any]]] = {}
    for ranks in (0, 2):
        began = time.monotonic()
        with forked_training(_made(folder / str(ranks)) / "run", ranks=ranks, figures=True) as run:
            run.finish()
        whole[ranks] = time.monotonic() - began, outcome(run.run_dir)
    print(dict(Counter(disturbed(_made(folder / f"seed-{seed}"), seed, whole) for seed in seeds)))


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
