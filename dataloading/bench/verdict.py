"""From a sweep's numbers to advice: the best setting and the changes that help.

A change is advised only after it was measured, in turns with the setting that it improves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common.benchmarking.timing import NOISE, paired_ratio
from dataloading.bench.settings import Setting, varying
from dataloading.bench.sweep import LoadingMeasurement
from dataloading.dataset.batches import FETCH_THREADS
from dataloading.dataset.decoders import installed

BATCH_SIZE = 32  # in a smaller one, the fixed cost of each batch may be the limit


def recommend(sweep: list[LoadingMeasurement]) -> LoadingMeasurement:
    """The cheapest of those that are as fast as the best, by its median, within noise.

    Cheapest means: fewest workers, then fewest fetch threads.

    :param sweep: settings that were measured in the same rounds
    """
    best = max(sweep, key=lambda measured: measured.images_per_s)
    ratios = [(measured, paired_ratio(measured.per_image, best.per_image)) for measured in sweep]
    as_fast = [one for one, ratio in ratios if ratio.median <= 1 + NOISE or ratio.low <= 1]
    return min(as_fast, key=lambda one: (one.setting.workers, one.setting.fetch_threads, -one.images_per_s))


def changes(setting: Setting, cores: int) -> list[Setting]:
    """The settings to compare with this one, each of which differs in what may be its limit.

    :param cores: number of usable cores
    """
    alternatives = (
        {"loader": "fast"},
        {"workers": cores},
        {"batch_size": max(BATCH_SIZE, setting.batch_size)},
        {"decoder": installed()[0]},
        {"fetch_threads": 1},
        {"fetch_threads": max(FETCH_THREADS, 2 * setting.fetch_threads)},
        {"persistent_workers": True},
        {"augmentation": "none"},
    )
    changed = (dataclasses.replace(setting, **change).canonical() for change in alternatives)
    return [one for one in dict.fromkeys(changed) if one != setting]


def explain(now: LoadingMeasurement, tried: Sequence[LoadingMeasurement], samples: int) -> list[str]:
    """The changes that make an epoch faster, the best first; if none does, those that were tried.

    :param now: the setting, and ``tried``: its :func:`changes`, measured in the same rounds
    :param samples: number of samples in the data set, for the length of an epoch
    """
    gains = {
        one.setting.label(varying([now.setting, one.setting])): paired_ratio(now.epoch_s(samples), one.epoch_s(samples))
        for one in tried
    }
    helpful = sorted((name for name in gains if gains[name].low > 1 + NOISE), key=lambda name: -gains[name].median)
    if helpful:
        return [f"measured: with {name}, an epoch is {gains[name]:.2f} times as fast" for name in helpful]
    return [f"no faster, measured: {', '.join(gains)}"]
