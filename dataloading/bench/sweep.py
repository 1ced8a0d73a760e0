"""Timing many settings under the same conditions: each once per round, round after round."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from common.benchmarking.timing import interleave
from dataloading.bench.settings import Library, Setting
from dataloading.doctor.watch.turn import alone, take_turn


@dataclass(frozen=True)
class LoadingMeasurement:
    """A setting's runs, one entry per round.

    :param setting: the setting
    :param images: those that arrived in each run's ``steady`` part
    :param first_batch: seconds from requesting an iterator to its first batch, with the start of the workers
    :param steady: seconds of the batches after the warm-up
    """

    setting: Setting
    images: int
    first_batch: list[float]
    steady: list[float]

    @property
    def images_per_s(self) -> float:
        """Throughput after the warm-up: the median of the runs."""
        return statistics.median(self.images / seconds for seconds in self.steady)

    @property
    def per_image(self) -> list[float]:
        """Seconds, one entry per round."""
        return [seconds / self.images for seconds in self.steady]

    def epoch_s(self, images: int) -> list[float]:
        """Seconds of an epoch of so many images, with the start of its workers, one entry per round."""
        return [first + images * each for first, each in zip(self.first_batch, self.per_image, strict=True)]


def measure(
    library: Library,
    settings: Sequence[Setting],
    *,
    batches: int,
    repeats: int,
    after_round: Callable[[], object],
) -> list[LoadingMeasurement]:
    """Run every setting once per round; a first round warms up and does not count.

    :param batches: timed batches of each run, after its warm-up
    :param repeats: rounds that count
    :param after_round: as in :func:`interleave`
    """
    runs = {
        setting: LoaderRun(
            functools.partial(library.loader, setting),
            setting.workers,
            setting.prefetch_factor * setting.workers,
            batches,
            library.device,
            setting.persistent_workers,
        )
        for setting in settings
    }
    named = {str(number): run for number, run in enumerate(runs.values())}
    rounds = len(interleave(named, repeats, after_round=after_round)["0"])
    return [
        LoadingMeasurement(setting, batches * setting.batch_size, run.first_batch[-rounds:], run.steady[-rounds:])
        for setting, run in runs.items()
    ]


class LoaderRun:
    """Repeated runs of one loader; a call makes one run and returns the seconds of its steady part. Persistent workers end with it.

    :param make_loader: makes a loader of a number of batches
    :param workers: threads or processes of the loader
    :param ahead: batches that the loader prefetches
    :param batches: timed batches, after the warm-up
    :param device: where batches are copied to, if it is not the CPU
    :param persistent: whether its workers are persistent; a run then consumes all batches, so that they are idle at its end
    """

    def __init__(
        self,
        make_loader: Callable[[int], Iterable[Any]],
        workers: int,
        ahead: int,
        batches: int,
        device: torch.device,
        persistent: bool = False,
    ) -> None:
        # The first batches come before all workers are busy, and the last when some are idle already. So the timed batches
        # lie between, and the prefetched ones at the end are never requested.
        self._going, self._batches = max(2, workers), batches
        self._device, self._persistent = device, persistent
        self._loader = make_loader(self._going + batches + max(2, ahead))
        self.first_batch: list[float] = []
        self.steady: list[float] = []

    def __call__(self) -> float:
        steps = take_turn(lambda: iter(self._loader), self._going, self._batches, rest=self._persistent)
        turn = alone(steps, self._copy)
        self.first_batch.append(turn.waits[0] + turn.uses[0])
        self.steady.append(turn.steady_s)
        return turn.steady_s

    def _copy(self, number: int, batch: Any) -> None:
        """Copy a batch to the device, and wait for it where a time is taken."""
        if self._device.type == "cpu":
            return
        tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), batch)
        if number + 1 in (1, self._going, self._going + self._batches):
            torch.cuda.synchronize(self._device)
