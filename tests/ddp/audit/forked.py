"""The audit of a script on ranks that have torch imported already: as ``python -m ddp.audit``, in a fifth of the time."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.foreign_script.run import INJECT, WATCH_VARIABLE
from ddp.audit.detectors import find
from ddp.audit.finding import Finding
from ddp.audit.launch import WATCH
from ddp.audit.trace import Trace, read
from ddp.audit.vary import RUN
from tests.support.launch import run_ranks


def judge(folder: Path, *arguments: object, hint: str | None = None) -> list[Finding]:
    """The findings about ``python ARGUMENTS`` on two ranks, hints left out.

    :param folder: a temporary one, for which ``{run}`` stands in the arguments
    :param hint: in the text of hints that are not left out
    :raises AssertionError: if the script failed, or the audit itself
    """
    trace = watch(folder, list(map(str, arguments)))
    findings = find(trace)
    assert trace.errors == []
    return [finding for finding in findings if not finding.is_hint or (hint and hint in finding.text)]


def watch(
    folder: Path,
    arguments: Sequence[str],
    ranks: int = 2,
    kill_at: int | None = None,
    batches: str = "",
    timeout_s: float = 120.0,
) -> Trace:
    """The main function of the ranks of ``python ARGUMENTS``. This runs a script for ``ddp.audit.vary``, too.

    :param folder: for which ``{run}`` stands in the arguments
    :param kill_at: after so many steps each rank kills itself
    :param batches: as :class:`ddp.audit.vary.Plan` has it
    """
    directory = Path(tempfile.mkdtemp(dir=folder))
    own = [argument.replace(RUN, str(folder)) for argument in arguments]
    with contextlib.suppress(AssertionError) if kill_at else contextlib.nullcontext():
        run_ranks(_run_watched, ranks, own, directory, kill_at, batches, timeout_s=timeout_s, fresh=True)
    return read(directory, ranks)


def _run_watched(arguments: Sequence[str], directory: Path, kill_at: int | None, batches: str) -> None:
    """Run a script on this rank."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("common", "ddp")]:
        del sys.modules[name]  # they are imported anew, once torch is watched
    np.random.seed()
    os.environ[WATCH_VARIABLE] = os.fspath(WATCH)
    os.environ["DDP_AUDIT_DIRECTORY"] = os.fspath(directory)
    os.environ["DDP_AUDIT_KILL_AT"] = str(kill_at or 0)
    os.environ["DDP_AUDIT_BATCHES"] = batches
    runpy.run_path(str(INJECT / "sitecustomize.py"))
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[is_module:])
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    start = functools.partial(runpy.run_module, alter_sys=True) if is_module else runpy.run_path
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            start(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise AssertionError(f"{arguments} ended with {end.code}") from None
