"""The ways to start loader workers, side by side: time to the first batch, memory, what breaks, what hangs.

    python -m dataloading.bench --start-method fork,forkserver,forkserver-preloaded,spawn,threads

Each start is a process of its own (dataloading/bench/start_once.py). ``threads`` are those of ``FastLoader``: the ``DataLoader`` of
torch 2.14 has none.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from common.benchmarking.figures import plot_stacked
from common.benchmarking.timing import Spread, interleave
from common.benchmarking.turns import Rounds, table, write_report
from common.data.loaders import loader_errors
from common.errors import UsageError
from dataloading.bench.start_once import EXTRAS, NOTHING, PRELOADED
from dataloading.dataset.image_files import ImageFiles

SIZES = {"": 0, ", 1,000,000 annotations": 1_000_000}
STARTS = 1_000  # of workers, while a thread holds a lock


def measure(methods: Sequence[str], workers: int, repeats: int, folder: str) -> dict[str, Any]:
    """Start workers in each way.

    :param workers: of each loader
    :param repeats: rounds, in each of which every way takes a turn with each size of a data set object
    :param folder: of JPEG files
    :returns: ``turns``: for each method and size what each start printed; ``breaks``: for each thing that may break and each method
        ``works`` or the error; ``hanging``: for each method, workers of :data:`STARTS` that never ended. The last two are empty after Ctrl-C
    :raises UsageError: for a folder without images, and with the error of a start that failed
    """

    def start(method: str, annotations: int, extra: str) -> subprocess.CompletedProcess[str]:
        return _python("start_once", method, str(workers), str(annotations), folder, extra)

    def turn(method: str, annotations: int) -> Any:
        done = start(method, annotations, NOTHING)
        if done.returncode:
            raise UsageError(f"workers that are started by {method} failed: {_error(done)}")
        return json.loads(done.stdout)

    def outcome(method: str, extra: str) -> str:
        done = start(method, 0, extra)
        return _error(done) if done.returncode else "works"

    with loader_errors():
        ImageFiles(folder).image_shape()
    turns: Any = {
        method + size: functools.partial(turn, method, annotations)
        for size, annotations in SIZES.items()
        for method in methods
    }
    with Rounds(repeats) as progress:
        seen: Any = interleave(turns, repeats, 0, lambda: progress.round_done(f"{len(turns)} starts"))
    return {
        "turns": seen,
        "breaks": {
            extra: {method: outcome(method, extra) for method in methods}
            for extra in progress.until_stopped(EXTRAS)
            if extra != NOTHING
        },
        "hanging": {
            method: _python("held_lock", method, str(STARTS)).stdout.strip()
            for method in progress.until_stopped(methods)
            if method != PRELOADED  # hangs as the fork server does
        },
    }


def _python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"dataloading.bench.{program}", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, start_new_session=True
    )  # Ctrl-C ends the rounds here


def _error(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of what a process that failed has printed."""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def report(config: Any, measured: dict[str, Any]) -> str:
    """Write the JSON and the picture; returns the tables.

    :param measured: what :func:`measure` returned
    """
    turns: dict[str, list[dict[str, float]]] = measured["turns"]
    columns: dict[str, dict[str, Spread]] = {}
    for name, starts in turns.items():
        for what in starts[0]:
            columns.setdefault(what, {})[name] = Spread.of([start[what] for start in starts])
    texts = {what: {name: f"{each:.2f}" for name, each in column.items()} for what, column in columns.items()}
    lines = table(texts, 26, 46)
    hanging = {f"of {STARTS:,} workers hang, if a thread holds a lock half of the time": measured["hanging"]}
    for what, outcomes in (measured["breaks"] | hanging).items():
        if not outcomes:  # after Ctrl-C
            continue
        lines += ["", f"{what}:", *(f"  {method:<32}{outcome}" for method, outcome in outcomes.items())]
    panels = {what: {"median": [each.median for each in column.values()]} for what, column in columns.items()}
    title = f"from iter() to the first batch, and memory of a worker: {config.repeats} starts of each"
    plot_stacked(config.output / "start-methods.png", panels, list(turns), x_title="", title=title)
    return write_report(config, "start-methods", measured, ["start-methods"], lines)
