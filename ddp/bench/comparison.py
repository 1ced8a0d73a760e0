"""Steps of variants on ranks: how long they take, and how the variants take turns.

``ddp.bench engines`` and ``sharding`` build all variants in the same processes. A turn begins with
a barrier; its time is that of the slowest rank, per step.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.benchmarking.turns import Rounds, Step, take_turns, timed_steps
from common.command_line.cli import option
from common.distributed.dist_env import DistEnv
from common.machine import keep_freed_memory
from ddp.bench.placement import Placement, place_ranks
from ddp.rendezvous.worker_group import WorkerGroup

FIRST_STEPS = 3  # of each variant are not measured: its buckets are rebuilt after the first


@dataclass(frozen=True)
class TurnsConfig:
    """Settings of a benchmark whose variants take turns on ranks that it starts."""

    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    builds: int = option(
        2,
        "times that all variants are rebuilt: memory placement alone can change a variant's time by a few percent",
        minimum=1,
    )
    rounds: int = option(6, "measured rounds per build; in each, every variant takes one turn", minimum=2)
    turn: float = option(0.25, "seconds of a variant's turn, rounded to whole steps", above=0)

    @property
    def placement(self) -> Placement:
        """Where the ranks run."""
        return place_ranks("cpu", self.ranks)


@dataclass(frozen=True)
class Comparison:
    """The times of variants that took turns; for each variant one entry per round.

    :param title: what they have in common, as the model
    :param seconds: wall seconds of a step on the slowest rank
    :param processor_seconds: of a step, the mean over the ranks
    :param reference: the variant that the others are compared with
    """

    title: str
    seconds: dict[str, list[float]]
    processor_seconds: dict[str, list[float]]
    reference: str


class StepWorker:
    """The service of one rank: the steps of all variants.

    :param variants: for each variant a function that builds it and returns its step; a collective
    """

    def __init__(self, env: DistEnv, variants: Mapping[str, Callable[[DistEnv], Step]]) -> None:
        self._device = env.device
        self._steps = {name: build(env) for name, build in variants.items()}

    def run(self, name: str, steps: int) -> tuple[float, float]:
        """Take some steps. See :func:`timed_steps`."""
        return timed_steps(self._steps[name], steps, self._device)


def compare(
    config: TurnsConfig,
    title: str,
    variants: Mapping[str, Callable[[DistEnv], Step]],
    references: Sequence[str],
    progress: Rounds,
) -> Comparison:
    """Let variants take turns on ranks.

    :param title: of the comparison, also for the progress bar
    :param variants: as :class:`StepWorker` takes them; they can be pickled
    :param references: the fastest of these variants becomes the reference
    """
    placement = config.placement

    @contextlib.contextmanager
    def build(names: list[str]) -> Iterator[dict[str, Callable[[], tuple[float, float]]]]:
        built = {name: variants[name] for name in names}
        with WorkerGroup(
            config.ranks, StepWorker, built, device=placement.device, backend=placement.backend, threads=1
        ) as ranks:

            def turn(name: str, steps: int) -> tuple[float, float]:
                wall, processor = zip(*ranks.call("run", name, steps), strict=True)
                return max(wall), statistics.fmean(processor)

            for name in names:
                turn(name, FIRST_STEPS)
            counts = {name: max(1, round(config.turn / turn(name, FIRST_STEPS)[0])) for name in names}
            yield {name: functools.partial(turn, name, counts[name]) for name in names}

    times = take_turns(config, variants, build, progress, title)
    seconds = {name: [wall for wall, _ in turns] for name, turns in times.items()}
    processor_seconds = {name: [processor for _, processor in turns] for name, turns in times.items()}
    reference = min(references, key=lambda name: statistics.median(seconds[name]))
    return Comparison(title, seconds, processor_seconds, reference)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Step:
    """A training step on one batch that is in memory. From here on, malloc keeps freed memory.

    :param labels: int64, of the shape of the model's outputs without their last dimension, the classes
    """
    keep_freed_memory()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()
        optimizer.step()

    return step
