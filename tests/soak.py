"""Kill training again and again, at moments drawn from a seed: each run must end with the bits that it would have had.

    python -m tests.soak --kills 50

For each way to train there is a run that nothing befalls. Then runs like it are killed: a rank, torchrun, everything at
once, or the process that writes a checkpoint while it does. The same command is given again until it ends well, and then the newest
checkpoint and the metrics are compared with those of the undisturbed run. Exit status 0 if all are equal, else 1.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common.command_line.cli import command, option, parse
from common.errors import UsageError
from common.files.run_directory import CONFIG_FILE
from common.signals.stop_request import stop_signals
from ddp.checkpoint import storage
from ddp.checkpoint.storage import name_of
from ddp.strategies import SHARDED
from tests.support.harm.kill import STEPS, VICTIMS, LaunchedRun, kill, training
from tests.support.harm.left import assert_nothing_left, differences, outcome

IN_A_SAVE = "in a save"
FAST = "fast"  # instead of a strategy
WHOM = (*VICTIMS, IN_A_SAVE)
LATEST = 1.2  # of the time to the last checkpoint; then come the figures
SAVES = 16  # of the 20 that a run writes, so that LATEST of them are never more
SAVE_S = 0.05  # about what one takes
MOST_STARTS = 6
ORPHANS_S = 60.0  # for ranks without torchrun to come to an end


@dataclass(frozen=True)
class SoakConfig:
    """Settings of ``tests.soak``."""

    kills: int = option(50, "runs that are killed, spread over all ways to train", minimum=1)
    seed: int = option(0, "of whom and when", minimum=0)
    only: tuple[str, ...] = option((), "ways whose name has all of these words, such as fp16,handwritten")
    jobs: int = option(2, "runs at a time", minimum=1)


@dataclass(frozen=True)
class Way:
    """A way to train."""

    precision: str
    workers: int
    grad_accumulation_steps: int
    strategy: str

    def __str__(self) -> str:
        return f"{self.precision}, {self.workers} workers, {self.grad_accumulation_steps} micro-steps, {self.strategy}"

    @property
    def flags(self) -> tuple[str, ...]:
        settings = {f"--{name.replace('_', '-')}": value for name, value in dataclasses.asdict(self).items()}
        chosen = ("--fast",) if settings.pop("--strategy") == FAST else ("--strategy", self.strategy)
        return (*chosen, *itertools.chain(*((flag, str(value)) for flag, value in settings.items())))


WAYS = [Way(*values) for values in itertools.product(("fp32", "fp16"), (0, 2), (1, 2), ("torch", "handwritten"))]
WAYS += [Way(*values) for values in itertools.product(("fp32", "fp16"), (0,), (2,), SHARDED)]
WAYS.append(Way("bf16", 2, 2, FAST))


@dataclass(frozen=True)
class Reference:
    """An undisturbed run.

    :param seconds: from the moment in which its directory is a run's, which comes after all imports, to its last checkpoint
    """

    result: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Fault:
    """An event that a run is to meet.

    :param victim: of :data:`WHOM`; :param at: when, as a share of the undisturbed run's time, or of its checkpoints
    """

    victim: str
    at: float


@dataclass
class Story:
    """The history of a run.

    :param killed: for each kill, whom, when (s after the run's directory was one) and the last step that was written down
    :param refused: starts that were, since ranks that had outlived their torchrun still held the directory
    :param failure: why it did not end well
    :param differences: what is not as in the undisturbed run
    """

    way: str
    asynchronous: bool
    killed: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    differences: list[str] = field(default_factory=list)
    failure: str | None = None

    @property
    def is_right(self) -> bool:
        return self.failure is None and not self.differences

    def __str__(self) -> str:
        kills = ", ".join(f"{one['victim']} after {one['seconds']:.1f} s (step {one['step']})" for one in self.killed)
        saves = "async saves" if self.asynchronous else "saves"
        end = "the right bits"
        if self.failure is not None:
            end = self.failure.partition("\n")[0]
        elif self.differences:
            end = f"OTHER BITS in {', '.join(self.differences[:5])}"
        refused = f"; {self.refused} starts refused" if self.refused else ""
        return f"{self.way}, {saves}: killed {kills}{refused}: {end}"


@command
def main() -> None:
    config = parse(SoakConfig, "tests.soak", __doc__)
    stories = soak(config)
    right = sum(story.is_right for story in stories)
    kills = sum(len(story.killed) for story in stories)
    print(f"{right} of {len(stories)} runs ended with the right bits, after {kills} kills")
    sys.exit(0 if right == len(stories) else 1)


def soak(config: SoakConfig) -> list[Story]:
    """One run for each of ``config.kills``, some of which are killed twice; a line is printed for each.

    :raises UsageError: when no way to train has all the words of ``config.only``
    """
    draw = random.Random(config.seed)
    ways = [way for way in WAYS if all(word in str(way) for word in config.only)]
    if not ways:
        raise UsageError(
            f"--only {','.join(config.only)}: no way to train has all of these words, as {WAYS[0]} has its own"
        )
    draw.shuffle(ways)
    plan = [
        (way, draw.random() < 0.5 and way.strategy not in SHARDED, list(_faults(draw, i)))
        for i, way in enumerate(itertools.islice(itertools.cycle(ways), config.kills))
    ]
    used = ways[: config.kills]
    print(f"seed {config.seed}: {config.kills} runs, {len(used)} ways to train", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as name, _threads(config.jobs) as pool:
        folder = Path(name)
        ends = pool.map(lambda way: undisturbed(way, folder / f"reference-{WAYS.index(way)}"), used)
        references = dict(zip(used, ends, strict=True))
        told = [
            pool.submit(disturbed, way, asynchronous, faults, references[way], folder / f"run-{number}")
            for number, (way, asynchronous, faults) in enumerate(plan)
        ]
        stories = []
        for number, story in enumerate(concurrent.futures.as_completed(told), start=1):
            stories.append(story.result())
            print(f"{number} of {len(plan)}: {stories[-1]}", flush=True)
        return stories


@contextlib.contextmanager
def _threads(jobs: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that start runs; a block that ends early, as by Ctrl-C or SIGTERM, ends them, and the runs."""
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        with stop_signals():
            yield pool
    except BaseException:
        ending = threading.Thread(target=pool.shutdown, kwargs={"cancel_futures": True})
        ending.start()
        while ending.is_alive():  # a thread may just be starting the next
            kill(psutil.Process().children(recursive=True))
            ending.join(0.1)
        raise
    pool.shutdown()


def _faults(draw: random.Random, number: int) -> Iterator[Fault]:
    """One, or for every fourth run two, for a run that is killed after it had been killed is another case."""
    yield Fault(WHOM[number % len(WHOM)], draw.uniform(0, LATEST))
    if draw.random() < 0.25:
        yield Fault(draw.choice(WHOM), draw.uniform(0, LATEST))


def undisturbed(way: Way, run_dir: Path) -> Reference:
    """A run that nothing befalls."""
    with training(run_dir, *way.flags) as run:
        run.until((run_dir / CONFIG_FILE).exists)
        began = time.monotonic()
        run.until((run_dir / storage.FOLDER / name_of(2, STEPS)).exists)
        seconds = time.monotonic() - began
        run.finish(300)
        return Reference(outcome(run_dir), seconds)


def disturbed(way: Way, asynchronous: bool, faults: list[Fault], reference: Reference, run_dir: Path) -> Story:
    """A run that meets all ``faults``, one after the other, and is started again until it ends well."""
    story = Story(str(way), asynchronous)
    try:
        _live_through(story, [*way.flags, *["--async-checkpoint"] * asynchronous], faults, reference.seconds, run_dir)
        story.differences = differences(run_dir, reference.result)
    except (AssertionError, UsageError) as error:
        story.failure = str(error)
    if not story.killed and story.failure is None:  # it was faster than the undisturbed run
        again = [dataclasses.replace(fault, at=fault.at / 2) for fault in faults]
        return disturbed(way, asynchronous, again, reference, run_dir.with_name(f"{run_dir.name}-again"))
    return story


def _live_through(story: Story, flags: list[str], faults: list[Fault], seconds: float, run_dir: Path) -> None:
    """:raises AssertionError: when it ends with an error, or leaves something behind"""
    waiting = list(faults)
    runs: list[LaunchedRun] = []
    with contextlib.ExitStack() as stack:  # since ranks may outlive their torchrun until the next one is done
        while True:
            assert len(runs) < MOST_STARTS, "it does not end"
            run = stack.enter_context(training(run_dir, *flags, "--auto-resume"))
            runs.append(run)
            hit = strike(run, waiting[0], seconds) if waiting else None
            status = run.wait(300)
            if hit is not None:
                story.killed.append(hit)
                waiting.pop(0)
            elif "is in use by process" in run.output:
                story.refused += 1
                for orphans in runs[:-1]:
                    orphans.seconds_to_end(ORPHANS_S)
                    kill(orphans.processes())
            else:
                assert status == 0, f"status {status}:\n{run.output}"
                break
        assert_nothing_left(*runs)


def strike(run: LaunchedRun, fault: Fault, seconds: float) -> dict[str, Any] | None:
    """Wait for the moment, and kill.

    :param seconds: that the undisturbed run took to its last checkpoint
    :returns: what was done; None when the run was over before
    """
    run.until((run.run_dir / CONFIG_FILE).exists)
    began = time.monotonic()
    victim, saves = fault.victim, set[str]()

    def the_save_has_begun() -> bool:
        saves.update(run.saves())
        return len(saves) > int(fault.at * SAVES)

    if victim == IN_A_SAVE:
        run.until(the_save_has_begun)
        time.sleep(fault.at * SAVES % 1 * SAVE_S)
        victim = "rank 0" if int(fault.at * SAVES) % 2 else "everything"
    else:
        run.until(lambda: time.monotonic() - began >= fault.at * seconds)
    victims = [] if run.is_over() else VICTIMS[victim](run)
    if not victims:
        return None
    in_a_save = bool(run.saves())
    kill(victims)
    return {
        "victim": f"{victim} {IN_A_SAVE}" if in_a_save else victim,
        "seconds": time.monotonic() - began,
        "step": run.step(),
    }


if __name__ == "__main__":
    main()
