"""The hand-written DDP against torch's, by the time of a training step (``python -m ddp.bench engines``).

Every DDP variant trains its own copy of one model on one batch that is already in memory: forward, backward with the
gradients averaged, optimizer step. All variants live in the same processes and take turns. A turn begins with a barrier; its
time is that of the slowest rank, per step. The processor time of all threads of a rank, Python's and gloo's included, does
not show waiting, but it separates the variants even on a machine that others use. One variant does not synchronize at all:
no DDP can be faster.

By default there is a rank for each GPU, over NCCL; with one GPU, one rank, whose time is what a wrapper costs without any
communication. Without a GPU there are two ranks over gloo, with a thread each. ``--device cuda`` with more ranks than GPUs lets
ranks share a GPU, over gloo, which copies through the host: a functional test more than a measurement.

malloc is told to keep freed memory. By default it returns freed gradients to the kernel, or keeps them, depending on where
they happen to lie. To get them back takes up to a third of a step, and no variant can influence that.

The variants are compared on a convolutional net, a ResNet-18, a wide MLP with large gradients and a deep MLP with many small
ones. The reference is the faster of torch's two modes there (gradients copied out of the buckets, or views into them).
The climb compares the three rungs by hand: an all-reduce per parameter, buckets, overlap with backward.
Then, on one model, the options of the wrappers:

- bucket size: MiB of a bucket; the default is 1 for the first and 25 for all others.
- overlap: all-reduces that start as soon as a bucket is complete, or only after all are. Both wrappers use the same
  communication hook and buckets of the default size, so that nothing else differs.
- hooks: gradients sent as bf16, or compressed by PowerSGD of rank 4. PowerSGD gets all gradients in one bucket: it starts a
  second all-reduce when the first is done, from any of gloo's threads. With several buckets at once the ranks would start
  them in different orders and deadlock.
- all-reduce: how the hand-written wrapper sums a bucket over the ranks, by each algorithm of ddp/all_reduce/choice.py. (Those
  but the backend's are for the CPU.)
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.cli import option, parse
from common.distributed.placement import Placement, place_ranks
from common.distributed.process_group import DEVICES, DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, run_alone, write_results
from common.reporting.benchmark_figures import plot_ratios
from common.reporting.timing import Spread, interleave, paired_ratio, paired_ratios
from ddp.bench.turns import SETTLING_STEPS, WARMUP, VariantTurn
from ddp.bench.variants import (
    BUCKETED,
    BY_HAND,
    CLIMB,
    DDP_VARIANTS,
    LARGE,
    NAIVE,
    NETWORKS,
    ON_THE_CPU,
    PLAIN,
    SAMPLES,
    SHARED,
    VIEWS,
    DDPVariant,
    DDPVariantWorker,
    Rung,
    build_network,
    variants_on,
    variations,
)

LONGEST_TURN = 6  # times the length of a turn, by the settling steps, which are slower than the rest


@dataclass(frozen=True)
class EnginesConfig:
    """Settings of ``ddp.bench engines``."""

    models: tuple[str, ...] = option(
        None,
        f"models on which the DDP variants are compared (default: all; on the CPU not {', '.join(LARGE)})",
        choices=NETWORKS,
    )
    variations: bool = option(True, "compare also the options of the wrappers")
    model: str = option("mlp", "the model on which options are compared", choices=NETWORKS)
    ranks: int = option(
        None, "processes (default: one per GPU; on the CPU 2, each with one thread)", minimum=1, maximum=64
    )
    device: str = option("auto", "auto takes CUDA where there is a GPU for each rank", choices=DEVICES)
    keep_memory: bool = option(
        True, "let malloc keep freed memory; otherwise chance decides which variant pays for its return"
    )
    builds: int = option(
        2,
        "times that all variants are rebuilt: memory placement alone can change a variant's time by a few percent",
        minimum=1,
    )
    rounds: int = option(6, "measured rounds per build; in each, every variant takes one turn", minimum=2)
    turn: float = option(0.25, "seconds of a variant's turn, rounded to whole steps", above=0)
    output: Path = option(Path("runs/bench-engines"), "folder of the JSON and the figures")

    def __post_init__(self) -> None:
        placement = self.placement
        models = NETWORKS if placement.gpus else ON_THE_CPU
        defaults = {"ranks": placement.ranks, "device": placement.device, "models": self.models or models}
        for name, value in defaults.items():
            object.__setattr__(self, name, value)

    @property
    def placement(self) -> Placement:
        return place_ranks(self.device, self.ranks)


@dataclass(frozen=True)
class DDPVariantsMeasurement:
    """The times of DDP variants that took turns.

    :param title: the model, or the option in which they differ
    :param seconds: for each variant, wall seconds of a step on the slowest rank; one entry per round
    :param processor_seconds: for each variant, processor seconds of a step, the mean over the ranks
    :param reference: the variant that the others are compared with
    """

    title: str
    seconds: Mapping[str, list[float]]
    processor_seconds: Mapping[str, list[float]]
    reference: str


def main(argv: Sequence[str]) -> None:
    config = parse(EnginesConfig, "ddp.bench engines", __doc__, argv)
    run_alone("ddp.bench engines", config.output, lambda: measure(config), lambda taken: report(config, *taken))


def measure(config: EnginesConfig) -> tuple[list[DDPVariantsMeasurement], list[DDPVariantsMeasurement]]:
    """Measure the variants on each model, and the options on one model."""
    subjects = variations() if config.variations else {}
    if config.device != "cpu":
        subjects.pop("all-reduce", None)  # there is none but the backend's
    total = (len(config.models) + len(subjects)) * config.builds * (config.rounds + WARMUP)
    compared, varied = [], []
    with Progress(DistEnv.alone(CPU), "bench", total) as progress:
        for model in config.models:
            taken = take_turns(
                config, model, variants_on(config.device, DDP_VARIANTS), functools.partial(progress.advance, 1, model)
            )
            reference = min((PLAIN, VIEWS), key=lambda name: statistics.median(taken[0][name]))
            compared.append(DDPVariantsMeasurement(model, *taken, reference))
        for subject, variants in subjects.items():
            taken = take_turns(config, config.model, variants, functools.partial(progress.advance, 1, subject))
            varied.append(DDPVariantsMeasurement(subject, *taken, VIEWS))
    return compared, varied


def take_turns(
    config: EnginesConfig, model: str, variants: Mapping[str, DDPVariant], after_round: Callable[[], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Build all variants of one model, and let them take turns.

    :returns: ``seconds`` and ``processor_seconds`` of :class:`DDPVariantsMeasurement`
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    processor_seconds: dict[str, list[float]] = {name: [] for name in variants}
    for build in range(config.builds):
        # The order of construction decides where tensors lie in memory, so every other build reverses it.
        order = list(variants)[:: -1 if build % 2 else 1]
        built = {name: variants[name] for name in order}
        arguments = (model, built, config.keep_memory)
        device, backend = config.placement.device, config.placement.backend
        with WorkerGroup(
            config.ranks, DDPVariantWorker, *arguments, device=device, backend=backend, threads=1
        ) as ranks:
            settling = {name: VariantTurn(ranks, name, SETTLING_STEPS)() for name in order}
            steps = max(1, round(config.turn / VariantTurn(ranks, order[0], SETTLING_STEPS)()))
            # All variants take as many steps, but for one that is far slower, as the naive one with hundreds of parameters.
            most = {name: max(1, round(LONGEST_TURN * config.turn / settling[name])) for name in order}
            turns = {name: VariantTurn(ranks, name, min(steps, most[name])) for name in order}
            taken = interleave(turns, config.rounds, WARMUP, lambda _: after_round())
            ranks.call("close")
        for name, turn in turns.items():
            seconds[name] += taken[name]
            processor_seconds[name] += turn.processor_seconds[WARMUP:]
    return seconds, processor_seconds


def report(config: EnginesConfig, compared: list[DDPVariantsMeasurement], varied: list[DDPVariantsMeasurement]) -> str:
    """Write the JSON and the figures, and return the summary to print."""
    write_results(
        config.output / "engines.json",
        {
            "config": asdict(config),
            "placement": str(config.placement),
            "samples_per_rank": SAMPLES,
            "models": [asdict(one) for one in compared],
            "climb": {
                one.title: [
                    {**asdict(rung), "milliseconds": asdict(milliseconds), "ratio": asdict(ratio)}
                    for rung, milliseconds, ratio in climb(one)
                ]
                for one in compared
            },
            "variations": [asdict(one) for one in varied],
        },
    )
    title = f"{config.placement}; {config.builds} x {config.rounds} rounds"
    files = ["engines.json", "engines.png", "climb.png"]
    torchs, rungs = "the faster of torch's two", {rung.variant: rung.name for rung in CLIMB}
    # The two lower rungs have a picture of their own: next to them, the others would all look alike.
    real = {name: name for name in compared[0].seconds if name not in (NAIVE, BUCKETED)}
    _plot(config.output / "engines.png", compared, f"DDP by hand against torch's: {title}", torchs, real)
    _plot(config.output / "climb.png", compared, f"the climb, by hand: {title}", torchs, rungs)
    if varied:
        files.append("variations.png")
        _plot(config.output / "variations.png", varied, f"options of the wrappers, {config.model}: {title}", VIEWS)
    lines = [f"{title}, median [quartiles]"]
    for one in compared:
        lines += [f"{_described(one.title)}, {SAMPLES[one.title]} samples per rank", *_table(one)]
    lines += ["", *_climb_table(compared)]
    lines += ["", *(verdict(one, name) for one in compared for name in (BY_HAND, SHARED) if name in one.seconds)]
    if varied:
        lines += ["", f"{config.model}, the options of the wrappers:"]
    for one in varied:
        lines += [one.title, *_table(one)]
    return "\n".join([*lines, files_line(config.output, files)])


def _described(model: str) -> str:
    parameters = list(build_network(model).parameters())
    megabytes = sum(parameter.nbytes for parameter in parameters) / 1e6
    return f"{model}, {len(parameters)} parameters of {megabytes:.1f} MB together"


def _table(measured: DDPVariantsMeasurement) -> list[str]:
    of_reference, width = f"of {measured.reference}'s", 31
    lines = [
        f"{'':<34}{'ms per step':>{width}}{of_reference:>{width}}{'ms of processor':>{width}}{of_reference:>{width}}"
    ]
    for name in measured.seconds:
        cells = []
        for times in (measured.seconds, measured.processor_seconds):
            milliseconds = Spread.of([1e3 * value for value in times[name]])
            cells += [f"{milliseconds:.2f}", f"{paired_ratio(times[name], times[measured.reference]):.3f}"]
        lines.append(f"  {name:<32}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def climb(measured: DDPVariantsMeasurement) -> list[tuple[Rung, Spread, Spread]]:
    """Each rung of the climb, with its milliseconds per step and the ratio to the reference."""
    seconds, reference = measured.seconds, measured.seconds[measured.reference]
    return [
        (
            rung,
            Spread.of([1e3 * value for value in seconds[rung.variant]]),
            paired_ratio(seconds[rung.variant], reference),
        )
        for rung in CLIMB
    ]


def _climb_table(compared: list[DDPVariantsMeasurement]) -> list[str]:
    width = 31
    lines = [f"{'The climb':<58}{'ms per step':>{width}}{'ratio to torch DDP':>{width}}"]
    for one in compared:
        lines.append(one.title)
        for rung, milliseconds, ratio in climb(one):
            lines.append(f"  {rung.name:<12}{rung.adds:<44}{f'{milliseconds:.2f}':>{width}}{f'{ratio:.3f}':>{width}}")
    return lines


def verdict(measured: DDPVariantsMeasurement, name: str) -> str:
    """A variant against torch's DDP, in a sentence. It says faster or slower only where both quartiles do."""
    reference = measured.reference
    ratio = paired_ratio(measured.seconds[name], measured.seconds[reference])
    if ratio.high < 1:
        found = "faster"
    elif ratio.low > 1:
        found = "slower"
    else:
        found = "as fast, within the noise"
    return f"{measured.title}: {name} takes {ratio:.3f} of the time of {reference}: {found}"


def _plot(
    path: Path,
    measured: list[DDPVariantsMeasurement],
    title: str,
    reference: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """:param names: the variants to draw, each with its label; None draws all"""
    panels = {
        one.title: {
            label: paired_ratios(one.seconds[name], one.seconds[one.reference])
            for name, label in (names or {name: name for name in one.seconds}).items()
        }
        for one in measured
    }
    plot_ratios(path, panels, title=title, x_title=f"time per step, as a multiple of '{reference}'")
