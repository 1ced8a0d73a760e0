"""One way to compare variants on a noisy machine, and one way to show the result.

A *variant* has a name and is built anyhow; its *turn* is a call that does some steps of it and returns what was measured.
:func:`take_turns` builds all variants several times and interleaves their turns in rounds. The times of one round pair up: other
work on the machine that slows a whole round cancels in the round's ratios. So results are medians and paired ratios with
their quartiles, one row per variant in a :func:`table`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from common.benchmarking.clock import clock_of
from common.benchmarking.other_work import OtherWork
from common.benchmarking.timing import Spread, interleave, paired_ratios
from common.command_line.cli import parse
from common.distributed.dist_env import DistEnv, require_alone
from common.distributed.rank_logging import Progress, rank_logging
from common.files.atomic_files import write_json
from common.files.run_directory import files_line, prepare_output, results_in
from common.reporting.provenance import describe_machine

logger = logging.getLogger(__name__)

T = TypeVar("T")
CPU = torch.device("cpu")
WARMUP = 1  # rounds of each build that do not count
Step: TypeAlias = Callable[[], object]
Times: TypeAlias = Mapping[str, list[float]]  # for each variant, one entry per round


def run_benchmark(
    config_type: type[Any],
    command: str,
    description: str | None,
    argv: Sequence[str] | None,
    measure: Callable[[Any], Any],
    report: Callable[[Any, Any], str],
) -> None:
    """Run a benchmark that starts its own processes, and print its report.

    The folder of the results is tried before the measurement begins. A warning says when other programs may have disturbed it.

    :param config_type: its settings, with a folder ``output``
    :param command: its name, ``"ddp.bench engines"``
    :param measure: of the settings
    :param report: of the settings and what was measured; writes the results and returns the summary
    :raises UsageError: for wrong settings, under torchrun, and for a folder that cannot be written
    """
    config = parse(config_type, command, description, argv)
    require_alone(command)
    with rank_logging(DistEnv.alone(CPU)):
        prepare_output(config.output)
        others = OtherWork()
        with stopped_by_ctrl_c():
            measured = measure(config)
        others.warn()
        with results_in(config.output):
            print(report(config, measured))
        if Rounds.stopped:
            raise KeyboardInterrupt  # the command ends as one that was interrupted


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """A block that Ctrl-C ends after the running round, so that what was measured is kept; a second one ends it at once."""

    def stop(*_: object) -> None:
        if Rounds.stopped is None:
            raise KeyboardInterrupt
        Rounds.stopped = True
        signal.signal(signal.SIGINT, before)
        logger.warning("stops after this round: the results will be of fewer rounds than are named")

    Rounds.stopped = None
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def write_results(path: Path, content: Mapping[str, object]) -> None:
    """Write a benchmark's JSON: the machine, the versions and the command, then ``content``.

    :raises OSError: when it cannot be written
    """
    write_json(path, {"machine": describe_machine(), **content})


def write_report(
    config: Any, name: str, content: Mapping[str, object], figures: Sequence[str], lines: Sequence[str]
) -> str:
    """Write a benchmark's JSON with its settings, and return its summary.

    :param config: its settings, a dataclass with a folder ``output``
    :param name: of the JSON
    :param figures: names of those that were drawn
    :param lines: of the summary; the files are added
    """
    write_results(config.output / f"{name}.json", {"config": asdict(config), **content})
    files = [f"{name}.json", *(f"{figure}.png" for figure in figures)]
    return "\n".join([*lines, files_line(config.output, files)])


class Rounds(Progress):
    """A progress bar over rounds; its lines, where the output is no terminal, say how long the rest will take."""

    stopped: bool | None = None  # whether the user wants no further round; None if nothing can be kept yet

    def __init__(self, rounds: int, env: DistEnv | None = None) -> None:
        super().__init__(env or DistEnv.alone(CPU), "bench", rounds)
        self._began = time.monotonic()

    def __enter__(self) -> Rounds:
        return self

    def until_stopped(self, subjects: Iterable[T]) -> Iterator[T]:
        """Yield subjects to be measured one after another, until the user stops the benchmark."""
        return itertools.takewhile(lambda _: not Rounds.stopped, subjects)

    def round_done(self, facts: str) -> bool:
        """One round more is done; returns whether the user wants no further."""
        self.advance(1, facts)
        Rounds.stopped = bool(Rounds.stopped)
        return Rounds.stopped

    def advance(self, steps: int, facts: str) -> None:
        left = (time.monotonic() - self._began) * (self._total / (self._done + steps) - 1)
        super().advance(steps, f"{facts}, about {left:.0f} s left")


def progress_of(config: Any, subjects: int, env: DistEnv | None = None) -> Rounds:
    """A progress bar over all rounds of so many sets of variants, see :func:`take_turns`."""
    return Rounds(subjects * config.builds * (config.rounds + WARMUP), env)


def take_turns(
    config: Any,
    names: Collection[str],
    build: Callable[[list[str]], AbstractContextManager[Mapping[str, Callable[[], T]]]],
    progress: Rounds,
    subject: str,
) -> dict[str, list[T]]:
    """Measure variants in rounds, in each of which every variant takes one turn.

    The order in which variants are built decides where their tensors lie in memory, which alone can change a time by some
    percent. So they are built several times, every other time in reverse.

    :param config: has ``builds``, the times that all variants are built, and ``rounds``, those that count in each build
    :param build: gets the names in the order of construction; its block has each variant's turn
    :param progress: advances by each round
    :param subject: what is measured, for the progress bar
    :returns: for each variant, ``builds * rounds`` results of its turns
    """
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in progress.until_stopped(range(config.builds)):
        with build(list(names)[:: -1 if number % 2 else 1]) as built:
            turns: Any = built
            measured: Any = interleave(turns, config.rounds, WARMUP, lambda: progress.round_done(subject))
        for name in names:
            results[name] += measured[name]
    return results


def timed_steps(step: Step, steps: int, device: torch.device = CPU) -> tuple[float, float]:
    """Call ``step`` ``steps`` times, on all ranks at once if there is a group of them.

    :param device: where its work is done
    :returns: wall seconds of a step, until its work is done, and processor seconds of all threads of this rank in it, both
        means. (On a GPU the latter are those that it takes to queue the work.)
    """
    clock = clock_of(device)
    if dist.is_initialized():
        dist.barrier()
    clock.start()
    began, processor_began = clock.stamp(), time.process_time()
    for _ in range(steps):
        step()
    ended, processor_seconds = clock.stamp(), time.process_time() - processor_began
    return (clock.seconds(ended) - clock.seconds(began)) / steps, processor_seconds / steps


def calls_of_a_turn(run: Callable[[int], float], at_least_s: float) -> int:
    """The number of calls that take at least so many seconds.

    :param run: does so many calls, and returns the mean seconds of one
    """
    calls = 1
    # The shorter of two attempts: a disturbed one must not end the search.
    while calls * min(run(calls) for _ in range(2)) < at_least_s:
        calls *= 2
    return calls


def ratios(times: Times, reference: str) -> dict[str, list[float]]:
    """Each variant's times as multiples of the reference's, round by round."""
    return {name: paired_ratios(values, times[reference]) for name, values in times.items()}


def cells(times: Times, spec: str, scale: float = 1.0) -> dict[str, str]:
    """The median and the quartiles of each variant's entries, times ``scale``, as text.

    :param spec: format of a number, such as ``.2f``
    """
    return {name: format(Spread.of([scale * value for value in values]), spec) for name, values in times.items()}


def table(columns: Mapping[str, Mapping[str, object]], width: int = 31, first: int = 34) -> list[str]:
    """Lines of a table.

    :param columns: for each heading its cells by the name of their row; a missing one is left empty
    :param width: characters of a column
    :param first: characters of the names of rows
    """
    rows = dict.fromkeys(name for of_rows in columns.values() for name in of_rows)
    heading = f"{'':<{first}}" + "".join(f"{title:>{width}}" for title in columns)
    return [
        heading,
        *(
            f"{f'  {name}':<{first}}" + "".join(f"{of_rows.get(name, '')!s:>{width}}" for of_rows in columns.values())
            for name in rows
        ),
    ]
