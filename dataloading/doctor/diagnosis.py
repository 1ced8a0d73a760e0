"""Examines one loader in a notebook or a test: ``print(diagnose(loader))``."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.foreign_script.failure import short
from common.foreign_script.run import injected
from common.machine import usable_cores
from dataloading.doctor import watch
from dataloading.doctor.causes import find
from dataloading.doctor.examine import WATCH
from dataloading.doctor.measured import read
from dataloading.doctor.report import report
from dataloading.doctor.watch.events import DIRECTORY_VARIABLE

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
            with _own_fork_server():
                _iterate(loader, time.monotonic() + seconds)
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


def _iterate(loader: DataLoader[Any], until: float) -> None:
    """Iterate over a copy of a loader: it has workers of its own, which are watched, and end with it even if they are persistent."""
    from dataloading.doctor.watch.settings import changed

    for _ in changed(loader, {}):
        if time.monotonic() > until:
            break


@contextlib.contextmanager
def _own_fork_server() -> Iterator[None]:
    """Fork workers from a new server. One that was started before lacks the watch's variables, and would keep them afterwards."""
    server: Any = forkserver.ForkServer()
    server.set_forkserver_preload(forkserver._forkserver._preload_modules)  # type: ignore[attr-defined]
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before
        server._stop()  # HACK: multiprocessing's own; without it, the server ends with this process
