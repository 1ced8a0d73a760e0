"""A run of a script with the best setting put in from outside, whose epochs are predicted before.

**The prediction.** Training and workers compete for the same cores, so the rate of a loader alone and the time of a step alone do not
tell the time of a step in the loop: on few cores, both become slower. Therefore nothing is added up from parts that were measured
apart. The step is timed in the script's own loop, with the new setting, while the script trains. What is left to a model is how
long an epoch takes that was not run to its end:

    epoch = start of the workers and the first batch of each + (steps - workers) x seconds of a step

The first epoch takes longer by what the script's first steps take (caches, memory), and by the first start of workers.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from dataloading.doctor.examine import run_watched
from dataloading.doctor.hangs import Patience
from dataloading.doctor.measured import read
from dataloading.doctor.script_run import PATIENCE_S, Script
from dataloading.doctor.search import Tried, in_words

CHECKED_EPOCHS = 2


def predicted_epoch(tried: Tried, steps: int, first: bool) -> float:
    """Seconds of an epoch with the best setting, see the head of this module.

    :param first: whether it is the first one of the script
    """
    seconds = statistics.fmean(turn.epoch_s(steps) for turn in tried.best)  # a median would forget rare slow samples
    if first and tried.started:
        seconds += tried.warm_up_s + tried.started.head_s - statistics.fmean(turn.head_s for turn in tried.best)
    return seconds


def check_best(
    script: Script, tried: Tried, seconds: float, tell: Callable[[str], object] = print
) -> list[tuple[int, float, float]]:
    """Predict the script's epochs with the best setting, and then run it under watch with this setting put in from outside.

    :param tried: with at least one gain
    :param seconds: of the run from its first batch; of an epoch that is longer, its beginning is measured
    :param tell: gets the prediction before the run begins, and then what was measured
    :returns: for each epoch its steps, and the seconds that were predicted and measured
    """
    setting = tried.gains[0].setting
    if math.isinf(tried.steps):
        text = f"{statistics.fmean(turn.step_s for turn in tried.best):.4f} s per step"
    else:
        first, later = (predicted_epoch(tried, int(tried.steps), first=first) for first in (True, False))
        text = f"{first:.2f} s for the first epoch of {tried.steps:.0f} steps, {later:.2f} s later"
    tell(f"predicted with {in_words(setting)}: {text}")
    with tempfile.TemporaryDirectory() as name:
        put_in = {"LOADER_DOCTOR_PLACE": script.place, "LOADER_DOCTOR_SETTING": json.dumps(setting)}
        patience = Patience(Path(name), seconds, PATIENCE_S)
        run_watched(script.command, {**script.environment, **put_in}, script.watches, patience)
        seen = [epoch for loader in read(Path(name)) if loader.line == script.place for epoch in loader.epochs()]
    whole = [(steps, measured) for steps, measured in seen if steps > 1]  # in others, the script has looked at a batch
    epochs = [
        (steps, predicted_epoch(tried, steps, first=not number), measured)
        for number, (steps, measured) in enumerate(whole[:CHECKED_EPOCHS])
    ]
    for steps, predicted, measured in epochs:
        tell(f"measured: {measured:.2f} s for {steps} steps, predicted {predicted:.2f} s")
    if not epochs:
        tell("measured: nothing, since no epoch of the loader was seen")
    return epochs
