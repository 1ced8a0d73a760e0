"""Where each millisecond goes that a synchronized step takes beyond one without synchronization (``python -m ddp.bench costs``).

Each DDP is taken apart into variants that each do one thing more, on the models and by the turns of ``ddp.bench engines``:

    no synchronization  ->  + hooks  ->  + copies  ->  + sums: the whole wrapper

- hooks: autograd calls the reducer for each gradient, and the reducer counts. (torch's cannot be had without the copies.)
- copies: each gradient is divided, and copied into its bucket; the optimizer reads it there.
- sums: the all-reduce of each bucket: what a rank computes, copies and sends for it.

What a part costs is the difference of two variants' processor times, round by round. It counts all threads of a rank: where a rank
has one core, a thread in the background takes its time from the computation. What the whole wrapper takes beyond these parts is
waiting: for the slower rank, for a thread to wake up, for the last bucket. So overlap can hide waiting, but not work.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.cli import option, parse
from common.cores import usable_cores
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, run_alone, write_results
from common.reporting.benchmark_figures import plot_stacked
from common.reporting.timing import Spread
from ddp.bench.engines import EnginesConfig, take_turns
from ddp.bench.turns import WARMUP
from ddp.bench.variants import NETWORKS, NO_SUM, ON_THE_CPU, DDPVariant

NOTHING = "no synchronization"
HOOKS, COPIES, HOOKS_AND_COPIES = "hooks", "copies", "hooks and copies"
SUMS, WAITING = "sums", "waiting"
PARTS = (HOOKS, COPIES, HOOKS_AND_COPIES, SUMS, WAITING)


@dataclass(frozen=True)
class Taken:
    """A DDP taken apart.

    :param parts: for each part, the variant that has it beside all parts before; the last variant is the whole DDP
    """

    name: str
    parts: Mapping[str, DDPVariant]


DDPS = (
    Taken("torch, gloo", {HOOKS_AND_COPIES: DDPVariant("torch", hook=NO_SUM), SUMS: DDPVariant("torch")}),
    Taken(
        "by hand, gloo",
        {
            HOOKS: DDPVariant("handwritten", hook=NO_SUM, copies=False),
            COPIES: DDPVariant("handwritten", hook=NO_SUM),
            SUMS: DDPVariant("handwritten"),
        },
    ),
    Taken(
        "by hand, shared memory",
        {
            HOOKS: DDPVariant("handwritten", hook=NO_SUM, copies=False),
            COPIES: DDPVariant("handwritten", hook=NO_SUM, all_reduce="shared-memory"),
            SUMS: DDPVariant("handwritten", all_reduce="shared-memory"),
        },
    ),
)
# The same variant in two DDPs is measured once.
VARIANTS = {NOTHING: DDPVariant("none")} | {str(variant): variant for ddp in DDPS for variant in ddp.parts.values()}


@dataclass(frozen=True)
class CostsConfig:
    """Settings of ``ddp.bench costs``."""

    models: tuple[str, ...] = option(ON_THE_CPU, "models on which the DDPs are taken apart", choices=NETWORKS)
    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    builds: int = option(2, "times that all variants are rebuilt", minimum=1)
    rounds: int = option(6, "measured rounds per build; in each, every variant takes one turn", minimum=2)
    turn: float = option(0.25, "seconds of a variant's turn, rounded to whole steps", above=0)
    output: Path = option(Path("runs/bench-costs"), "folder of the JSON and the figure")


@dataclass(frozen=True)
class Costs:
    """What the parts of all DDPs cost on one model.

    :param step: milliseconds of a step without synchronization
    :param parts: for each DDP and part, the milliseconds that it adds
    :param whole: for each DDP, the milliseconds that its step takes beyond one without synchronization
    """

    model: str
    step: Spread
    parts: Mapping[str, Mapping[str, Spread]]
    whole: Mapping[str, Spread]


def main(argv: Sequence[str]) -> None:
    config = parse(CostsConfig, "ddp.bench costs", __doc__, argv)
    run_alone("ddp.bench costs", config.output, lambda: measure(config), lambda measured: report(config, measured))


def measure(config: CostsConfig) -> list[Costs]:
    """Take the DDPs apart on each model."""
    turns = EnginesConfig(
        device="cpu", ranks=config.ranks, builds=config.builds, rounds=config.rounds, turn=config.turn
    )
    measured = []
    with Progress(
        DistEnv.alone(CPU), "bench", len(config.models) * config.builds * (config.rounds + WARMUP)
    ) as progress:
        for model in config.models:
            seconds, processor = take_turns(turns, model, VARIANTS, functools.partial(progress.advance, 1, model))
            measured.append(costs(model, seconds, processor))
    return measured


def costs(model: str, seconds: Mapping[str, list[float]], processor: Mapping[str, list[float]]) -> Costs:
    """The differences between variants that have one part more.

    :param seconds: for each of :data:`VARIANTS`, the wall seconds of a step, one entry per round
    :param processor: and its processor seconds
    """
    found: dict[str, dict[str, Spread]] = {}
    whole: dict[str, Spread] = {}
    for ddp in DDPS:
        names = [NOTHING, *map(str, ddp.parts.values())]
        found[ddp.name] = {
            part: Spread.of(_differences(processor[now], processor[before]))
            for part, before, now in zip(ddp.parts, names, names[1:], strict=False)
        }
        wall, computed = (_differences(times[names[-1]], times[NOTHING]) for times in (seconds, processor))
        found[ddp.name][WAITING] = Spread.of([a - b for a, b in zip(wall, computed, strict=True)])
        whole[ddp.name] = Spread.of(wall)
    return Costs(model, Spread.of([1e3 * value for value in seconds[NOTHING]]), found, whole)


def _differences(more: list[float], less: list[float]) -> list[float]:
    """In milliseconds, round by round."""
    return [1e3 * (a - b) for a, b in zip(more, less, strict=True)]


def report(config: CostsConfig, measured: Sequence[Costs]) -> str:
    """Write the JSON and the figure, and return the tables to print."""
    write_results(
        config.output / "costs.json", {"config": asdict(config), "models": [asdict(costs) for costs in measured]}
    )
    title = f"{config.ranks} ranks on {usable_cores()} cores; {config.builds} x {config.rounds} rounds"
    plot_stacked(
        config.output / "costs.png",
        {
            one.model: {
                part: [max(0.0, ddp[part].median) if part in ddp else 0.0 for ddp in one.parts.values()]
                for part in PARTS
            }
            for one in measured
        },
        [ddp.name.replace(", ", ",\n") for ddp in DDPS],
        x_title="",
        y_title="ms per step beyond one without synchronization",
        title=f"what each part of a DDP costs: {title}",
        totals={one.model: [whole.median for whole in one.whole.values()] for one in measured},
    )
    lines = [f"{title}, milliseconds per step, median [quartiles] of the differences round by round"]
    for one in measured:
        lines += ["", f"{one.model}: a step without synchronization takes {one.step:.2f}"]
        lines += [f"{'':<20}" + "".join(f"{name:>28}" for name in one.parts)]
        for part in PARTS:
            cells = [f"{ddp[part]:.2f}" if part in ddp else "-" for ddp in one.parts.values()]
            lines.append(f"  {part:<18}" + "".join(f"{cell:>28}" for cell in cells))
        lines.append(f"  {'the whole':<18}" + "".join(f"{f'{whole:.2f}':>28}" for whole in one.whole.values()))
    return "\n".join([*lines, files_line(config.output, ["costs.json", "costs.png"])])
