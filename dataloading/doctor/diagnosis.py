"""Examines one loader in a notebook or a test: ``print(diagnose(loader))``."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.foreign_script.run import injected
from common.machine import usable_cores
from dataloading.doctor import watch
from dataloading.doctor.causes import find
from dataloading.doctor.examine import DIRECTORY_VARIABLE, WATCH
from dataloading.doctor.measured import read
from dataloading.doctor.report import report
from dataloading.doctor.source import short

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def diagnose(loader: DataLoader[Any], seconds: float = 10.0, trials: float = 30.0) -> str:
    """Iterate over a loader for some seconds, and say where the time goes, in which lines, what is wrong, and which settings help.

    The iteration draws what any iteration draws of the random numbers, and nothing else.

    :param seconds: after which it ends, if the loader has not ended before
    :param trials: seconds in which other settings are tried then; 0 for none
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="loader-doctor-") as name:
        os.environ.update({**injected(WATCH), DIRECTORY_VARIABLE: name})  # for workers that are not forked
        watch.begin(name)
        try:
            until = time.monotonic() + seconds
            for _ in loader:
                if time.monotonic() > until:
                    break
        finally:
            watch.end()
            os.environ.clear()
            os.environ.update(before)
        measured, *_ = read(Path(name))
    lines = list(report(measured, find(measured, usable_cores()), trains=False))
    if trials:
        from dataloading.doctor.trials import try_loader  # torch, which the command's --help does without

        lines += try_loader(loader, trials, short(measured.line)).lines
    return "\n".join(lines)
