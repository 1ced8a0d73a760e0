"""What both timelines do with recorded steps, whatever was recorded: record, choose the one to draw, tabulate, write."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, write_results
from common.reporting.timing import Spread

WARMUP = 3  # unrecorded steps; buckets are final, and the order of units is known, after the first
BLOCK = 5  # consecutive steps between two reports of progress
FILES = ("timeline.png", "trace.json", "steps.json")


class Moments(Protocol):
    """The moments of one step on one rank, in seconds."""

    @property
    def began(self) -> float: ...

    @property
    def ended(self) -> float: ...


def record(ranks: WorkerGroup, count: int, after_block: Callable[[int], object] = lambda _: None) -> list[list[Any]]:
    """Let a worker group ``run`` so many steps; each step's moments on each rank.

    :param after_block: called with the number of steps of each block
    """
    steps: list[list[Any]] = []
    with Progress(DistEnv.alone(CPU), "timeline", count) as progress:
        ranks.call("run", WARMUP)
        while len(steps) < count:
            block = min(BLOCK, count - len(steps))
            steps += map(list, zip(*ranks.call("run", block), strict=True))
            after_block(block)
            progress.advance(block, f"{1e3 * (steps[-1][0].ended - steps[-1][0].began):.0f} ms each")
    return steps


def median_step(steps: Sequence[Sequence[Moments]]) -> int:
    """The index of the step of median duration."""
    durations = [statistics.fmean(rank.ended - rank.began for rank in step) for step in steps]
    return durations.index(statistics.median_low(durations))


def table(rows: Mapping[str, str], parts: Sequence[Sequence[object]]) -> list[str]:
    """Lines of the medians over the steps, a column for each rank.

    :param rows: for each attribute of the parts, in seconds, what to call it
    :param parts: of each step, on each rank
    """
    ranks = range(len(parts[0]))
    lines = [f"{'ms, median [quartiles]':<38}" + "".join(f"{f'rank {rank}':>28}" for rank in ranks)]
    for name, words in rows.items():
        spreads = [Spread.of([1e3 * getattr(step[rank], name) for step in parts]) for rank in ranks]
        lines.append(f"{words:<38}" + "".join(f"{f'{spread:.1f}':>28}" for spread in spreads))
    return lines


def write_steps(
    output: Path, config: Any, facts: Mapping[str, Any], steps: Sequence[Sequence[Any]], parts: Sequence[Sequence[Any]]
) -> None:
    """Write ``steps.json``.

    :param config: a dataclass
    :param facts: of the run
    :param steps: the moments of each step on each rank, dataclasses
    :param parts: of the same, dataclasses
    """
    both = [zip(*one, strict=True) for one in zip(steps, parts, strict=True)]
    moments = [[{"moments": asdict(rank), "parts": asdict(its)} for rank, its in step] for step in both]
    write_results(
        output / "steps.json", {"config": asdict(config), **facts, "shown": median_step(steps), "steps": moments}
    )


def summary(output: Path, lines: Sequence[str], steps: Sequence[Sequence[Moments]]) -> str:
    """What is printed: these lines, which step is drawn, and the files."""
    drawn = f"drawn is step {median_step(steps) + 1} of {len(steps)}, the one of median duration"
    return "\n".join([*lines, drawn, files_line(output, FILES, traces=True)])


def counted(number: int, word: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {word}{'s' * (number > 1)}"
