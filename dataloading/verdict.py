"""From a sweep's numbers to advice: which setting, how sure, what limits it, and whether training would wait."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from common.timing import Spread, paired_ratio
from dataloading.stages import StageCosts
from dataloading.sweep import Measured

NOISE = 0.03  # settings whose medians differ by less are not told apart


@dataclass(frozen=True)
class Recommendation:
    """What to choose.

    :param best: the fastest by its median
    :param chosen: the cheapest of those that cannot be told from the best
    :param equals: these others
    :param ratios: each setting's time per image as a multiple of the best's, paired round by round
    """

    best: Measured
    chosen: Measured
    equals: list[Measured]
    ratios: list[Spread]


def recommend(sweep: list[Measured]) -> Recommendation:
    """Choose among settings that were measured in the same rounds.

    Cheapest means: fewest workers, then fewest fetch threads, then the smallest batch on its way.
    """
    best = max(sweep, key=lambda measured: measured.images_per_s)
    ratios = [paired_ratio(measured.per_image, best.per_image) for measured in sweep]
    alike = [m for m, ratio in zip(sweep, ratios, strict=True) if m is best or ratio.median <= 1 + NOISE]
    chosen = min(alike, key=_cost)
    return Recommendation(best, chosen, [measured for measured in alike if measured is not chosen], ratios)


def _cost(measured: Measured) -> tuple[float, ...]:
    setting = measured.setting
    memory = setting.batch_size * setting.prefetch_factor * max(1, setting.workers)
    return setting.workers, setting.fetch_threads, memory, -measured.images_per_s


def explain(chosen: Measured, costs: StageCosts, samples: int, cores: int) -> str:
    """What limits a setting, in words.

    :param samples: in the data set, so that its epoch's length is known
    :param cores: that may be used
    """
    setting = chosen.setting
    epoch_s = samples / chosen.images_per_s
    start_s = max(0.0, statistics.median(chosen.first_batch) - setting.batch_size / chosen.images_per_s)
    if start_s > epoch_s:
        cure = "" if setting.persistent_workers else ": --persistent-workers yes saves it in all epochs but the first"
        return f"startup-bound: the workers take {start_s:.2f} s to start, an epoch {epoch_s:.2f} s{cure}"
    if costs.waiting > 0.5:
        threads = max(2, round(cores / (1 - costs.waiting) / max(1, setting.workers)))
        return (
            f"latency-bound: {100 * costs.waiting:.0f} % of an image's {_ms(costs.wall)} is waiting for storage, in which no "
            f"core works: more requests at a time would help (--fetch-threads {min(threads, 64)}), more cores would not"
        )
    largest = costs.largest
    share = f"{100 * costs.stages[largest].wall / costs.wall:.0f} % of an image's {_ms(costs.wall)}"
    if largest in ("hand-over", "collate"):
        return (
            f"transfer-bound: {share} goes into {largest}, not into the image; a quarter of the bytes (uint8 instead of "
            "float), or none that must travel, would help: --loader fast"
        )
    if largest in ("augment", "resize", "transform"):
        word = {"augment": "augmentation", "resize": "resizing", "transform": "transform"}[largest]
        return f"{word}-bound: {share} goes into it; do it on whole batches on the device, or do less"
    if largest in ("open", "read"):
        return f"storage-bound: {share} goes into {largest}ing files: larger files that hold many images would help"
    faster = (
        "" if setting.decoder != "pillow" else "; a faster decoder would help (pip install 'raw-ddp[fast]', --decoder)"
    )
    return f"decode-bound: {share} goes into decoding, and {cores} cores can do no more than that{faster}"


def waiting_for(sweep: list[Measured], step_s: float) -> str:
    """Whether training with steps of this length would wait for its data, and with how many workers it would not."""
    lines = []
    enough = None
    for measured in sorted(sweep, key=lambda m: (m.setting.workers, m.setting.fetch_threads)):
        load_s = statistics.median(measured.per_image) * measured.setting.batch_size
        share = max(0.0, 1 - step_s / load_s)
        workers = measured.setting.workers
        busy = load_s + step_s if workers == 0 else max(load_s, step_s)  # nobody loads while the main process computes
        if workers == 0:
            share = load_s / busy
        if share < 0.01 and enough is None:
            enough = workers
        lines.append((workers, load_s, share))
    fastest = min(lines, key=lambda line: line[1] if line[0] else float("inf"))
    step = f"a step of {_ms(step_s)}"
    if enough is not None:
        return f"{step} would not wait for data with {enough} worker{'' if enough == 1 else 's'} (or more)"
    return (
        f"{step} would wait for data {100 * fastest[2]:.0f} % of the time even with {fastest[0]} workers (a batch takes "
        f"{_ms(fastest[1])}): no number of workers tried here cures that"
    )


def confidence(recommendation: Recommendation, axes: list[str]) -> str:
    """How sure the choice is: who cannot be told from it, or by how much the next is slower."""
    chosen = recommendation.chosen
    if recommendation.equals:
        names = " and ".join(measured.setting.label(axes) for measured in recommendation.equals)
        return f"{names} {'is' if len(recommendation.equals) == 1 else 'are'} within noise of it, and cost more"
    others = [ratio for ratio in recommendation.ratios if ratio.median > 1 + NOISE]
    if not others:
        return "the only setting that was tried"
    return f"the next takes {min(others, key=lambda ratio: ratio.median):.2f} times as long, paired round by round"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"
