"""The audit of a script on ranks that have torch imported already: as ``python -m ddp.audit``, in a fifth of the time."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ddp.audit.detectors import find
from ddp.audit.detectors.finding import Finding
from ddp.audit.launch import INJECT
from ddp.audit.trace import Trace, read
from tests.support.launch import run_ranks


def judge(folder: Path, *arguments: object) -> list[Finding]:
    """What is wrong with ``python ARGUMENTS`` on two ranks, hints left out.

    :param folder: a temporary one
    :raises AssertionError: if the script failed, or the audit itself
    """
    trace = watch(folder, map(str, arguments))
    findings = find(trace)
    assert trace.errors == []
    return [finding for finding in findings if not finding.is_hint]


def watch(
    folder: Path, arguments: Iterable[str], ranks: int = 2, kill_at: int | None = None, timeout_s: float = 120.0
) -> Trace:
    """What the ranks of ``python ARGUMENTS`` do.

    :param kill_at: after so many steps each rank kills itself
    """
    directory = Path(tempfile.mkdtemp(dir=folder))
    try:
        run_ranks(_run_watched, ranks, tuple(arguments), directory, kill_at, timeout_s=timeout_s, fresh=True)
    except AssertionError:
        if not kill_at:
            raise
    return read(directory)


def _run_watched(arguments: tuple[str, ...], directory: Path, kill_at: int | None) -> None:
    """Run a script on this rank."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "ddp")]:
        del sys.modules[name]  # they are imported anew, once torch is watched
    np.random.seed()
    os.environ["DDP_AUDIT_DIRECTORY"] = os.fspath(directory)
    os.environ["DDP_AUDIT_KILL_AT"] = str(kill_at or 0)
    runpy.run_path(str(INJECT / "sitecustomize.py"))["_load_watch"]().install()
    script, *sys.argv[1:] = arguments if arguments[0] != "-m" else arguments[1:]
    sys.argv[0] = script
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            if arguments[0] == "-m":
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(script))
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{arguments} ended with {end.code}") from None
