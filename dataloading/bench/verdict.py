"""From a sweep's numbers to advice: the best setting, its confidence, its limit, and whether training would wait."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from common.reporting.timing import Spread, paired_ratio
from dataloading.bench.stages import StageCosts
from dataloading.bench.sweep import LoadingMeasurement
from dataloading.dataset.decoders import installed

_TRANSFER = (
    "transfer-bound",
    "sending batches, not into the image; a quarter of the bytes (uint8 instead of float), or none that must travel, would help: "
    "--loader fast",
)
_STORAGE = "storage-bound", "opening and reading files; fewer and larger files would help"
# For the stage that takes most of the work: the name of the limit, and what to do.
_LIMITS = {
    "IPC": _TRANSFER,
    "collate": _TRANSFER,
    "augment": ("augment-bound", "augmentation; augment whole batches on the device, or less"),
    "resize": ("resize-bound", "resizing; keep smaller images on the disk"),
    "transform": (
        "transform-bound",
        "making float tensors; leave the pixels uint8 for the device to convert, as --loader fast does",
    ),
    "open": _STORAGE,
    "read": _STORAGE,
}
NOISE = 0.03  # settings count as equal if they differ by less, or if a quarter of the rounds had the other order


@dataclass(frozen=True)
class Recommendation:
    """The setting to choose.

    :param chosen: the cheapest of those that are as fast as the best, by its median, within noise
    :param equals: the others of those
    :param ratios: each setting's time per image as a multiple of the best's, paired round by round
    """

    chosen: LoadingMeasurement
    equals: list[LoadingMeasurement]
    ratios: list[Spread]


def recommend(sweep: list[LoadingMeasurement]) -> Recommendation:
    """Choose among settings that were measured in the same rounds.

    Cheapest means: fewest workers, then fewest fetch threads, then the fewest prefetched images.
    """
    best = max(sweep, key=lambda measured: measured.images_per_s)
    ratios = [paired_ratio(measured.per_image, best.per_image) for measured in sweep]
    alike = [m for m, ratio in zip(sweep, ratios, strict=True) if ratio.median <= 1 + NOISE or ratio.low <= 1]
    chosen = min(alike, key=_cost)
    return Recommendation(chosen, [measured for measured in alike if measured is not chosen], ratios)


def _cost(measured: LoadingMeasurement) -> tuple[float, ...]:
    setting = measured.setting
    memory = setting.batch_size * setting.prefetch_factor * max(1, setting.workers)
    return setting.workers, setting.fetch_threads, memory, -measured.images_per_s


def explain(chosen: LoadingMeasurement, costs: StageCosts, samples: int, cores: int) -> str:
    """The limit of a setting, in words.

    :param chosen: the setting's runs
    :param costs: its stages
    :param samples: number of samples in the data set, for the length of an epoch
    :param cores: number of usable cores
    """
    setting = chosen.setting
    epoch_s = samples / chosen.images_per_s
    # One worker loads the first batch of ``DataLoader``; all workers share the fast loader's.
    first_s = costs.wall * setting.batch_size if setting.loader == "stock" else setting.batch_size / chosen.images_per_s
    start_s = max(0.0, statistics.median(chosen.first_batch) - first_s)
    if setting.uses_processes and start_s > epoch_s:
        cure = "" if setting.persistent_workers else ": --persistent-workers yes saves it in all epochs but the first"
        return f"startup-bound: the workers take {start_s:.2f} s to start, {samples:,} images {epoch_s:.2f} s{cure}"
    receiving = costs.receiving * chosen.images_per_s
    if receiving > 0.8:
        return (
            f"transfer-bound: the main process is busy {100 * receiving:.0f} % of the time receiving batches, and no worker "
            "can do that for it; a quarter of the bytes (uint8 instead of float) would help: --loader fast"
        )
    workers, requests = max(1, setting.workers), max(1, setting.workers) * setting.fetch_threads
    busy_cores = requests * (1 - costs.waiting)
    if costs.waiting > 0.5 and busy_cores < 0.8 * cores:
        threads = min(64, math.ceil(cores / (1 - costs.waiting) / workers))
        return (
            f"latency-bound: {100 * costs.waiting:.0f} % of an image's {_ms(costs.wall)} is waiting for storage, in which no "
            f"core works; more requests at a time help (--fetch-threads {max(threads, 2 * setting.fetch_threads)}), more "
            "cores do not"
        )
    largest = costs.largest
    share = f"{100 * costs.stages[largest].cpu / costs.cpu:.0f} % of an image's {_ms(costs.cpu)} of work"
    hidden = f"waiting for storage is hidden by {requests} requests at a time; now " if costs.waiting > 0.5 else ""
    if largest in _LIMITS:
        limit, advice = _LIMITS[largest]
        return f"{hidden}{limit}: {share} goes into {advice}"
    fastest = installed()[0]
    how = "pip install 'raw-ddp[fast]'" if fastest == "pillow" else f"--decoder {fastest}"
    faster = f"; a faster decoder helps ({how})" if setting.decoder == "pillow" else ""
    saturated = f"on {min(requests, cores)} of {cores} cores"
    return f"{hidden}decode-bound: {share} goes into decoding, {saturated}{faster}"


def waiting_for(sweep: list[LoadingMeasurement], step_s: float, axes: list[str]) -> str:
    """Whether training with steps of this length would wait for its data, and which setting avoids that.

    It assumes that the step leaves all cores to the workers, as a step on a GPU does.

    :param sweep: settings of one batch size
    :param step_s: seconds of a step
    :param axes: the fields by which the settings differ
    """
    enough = [measured for measured in sweep if wait_share(measured, step_s) < 0.01]
    step = f"a training step of {_ms(step_s)}"
    if enough:
        return f"{step} does not wait for its batch with {min(enough, key=_cost).setting.label(axes)}"
    least = min(sweep, key=lambda measured: wait_share(measured, step_s))
    batch_s = statistics.median(least.per_image) * least.setting.batch_size
    return (
        f"{step} waits for data {100 * wait_share(least, step_s):.0f} % of the time even with {least.setting.label(axes)} "
        f"(a batch takes {_ms(batch_s)}); nothing tried cures that: loading must be {batch_s / step_s:.1f} times as fast"
    )


def wait_share(measured: LoadingMeasurement, step_s: float) -> float:
    """The share of the training time spent waiting for data."""
    batch_s = statistics.median(measured.per_image) * measured.setting.batch_size
    if measured.setting.workers == 0:  # the main process either loads or computes
        return batch_s / (batch_s + step_s)
    return max(0.0, 1 - step_s / batch_s)


def confidence(recommendation: Recommendation, axes: list[str]) -> str:
    """The confidence of the choice: the settings that are equal within noise, or the lead over the next one."""
    if recommendation.equals:
        names = "; ".join(measured.setting.label(axes) for measured in recommendation.equals)
        return f"within noise of it, and no cheaper: {names}"
    others = [ratio for ratio in recommendation.ratios if ratio.median > 1 + NOISE]
    if not others:
        return "the only setting that was tried"
    return f"the next takes {min(others, key=lambda ratio: ratio.median):.2f} times as long, paired round by round"


def _ms(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
