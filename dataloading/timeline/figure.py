"""The timeline's picture: a lane per process, a frame around each batch, and what a late file does to the others."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.reporting.gantt import LABEL_SIZE, Gantt, new_gantt, save_gantt
from common.reporting.run_figures import COLORS
from dataloading.timeline.tracing import LoaderTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# For each stage its label in the legend, and its color.
STARTING = ("starting workers", "#d3d8dc")
STYLES = {
    "start workers": STARTING,
    "start": STARTING,
    "wait": ("main process waits", "#f9ddd3"),
    "consume": ("main process works on a batch", COLORS[5]),
    "read": ("open + read", COLORS[4]),
    "late": ("a file answers late", COLORS[1]),
    "decode": ("decode", COLORS[0]),
    "resize": ("resize", "#7db3da"),
    "augment": ("augment", COLORS[3]),
    "transform": ("to tensor", COLORS[2]),
    "collate": ("collate", "#6b4b3a"),
}
MOST_NUMBERS = 12  # in a list of batches
LABEL_PX = 26  # the width of a batch's number, and what is around it


def plot_timeline(path: Path, runs: Sequence[LoaderTrace], title: str, idle_reason: str) -> None:
    """Draw the runs one above the other on one time axis.

    :param path: of the PNG
    :param idle_reason: why a worker is idle while the main process waits for another worker's batch
    """
    heights = [1.0 + len(run.lanes) for run in runs]
    figure, axes = new_gantt(heights, 2.6 + 0.5 * sum(heights), title)
    end = max(run.end for run in runs)
    for plot, run in zip(axes, runs, strict=True):
        _draw_run(Gantt(plot, end, run.title), run, idle_reason)
    _bracket(axes[0], 0, runs[0].batches[0].taken, first_batch(runs[0]))
    axes[-1].set_xlabel("ms since the main process asked for the loader's iterator")
    names = {span.name for run in runs for span in run.spans}
    save_gantt(path, figure, dict(style for name, style in STYLES.items() if name in names))


def first_batch(run: LoaderTrace) -> str:
    """Say what the time until the first batch was spent on."""
    first = run.batches[0]
    return (
        f"first batch after {_ms(first.taken)}: {_ms(first.began)} until a worker began with it, "
        f"{_ms(first.finished - first.began)} of work, {_ms(first.taken - first.finished)} until it was taken"
    )


def _draw_run(gantt: Gantt, run: LoaderTrace, idle_reason: str) -> None:
    # Every span is a box in its lane, with inner spans drawn over outer ones.
    for name, (_, color) in STYLES.items():
        for y, lane in enumerate(run.lanes):
            intervals = [(span.start, span.end) for span in run.spans if (span.name, span.lane) == (name, lane)]
            # Without snapping to pixels, boxes narrower than a pixel blend; with it, the last one would hide the others.
            gantt.boxes(y, intervals, color=color, linewidth=0, snap=False)
    for span in run.named("consume"):
        style: dict[str, Any] = {"color": "white", "fontsize": 8}
        number = str(span.facts["batch"])
        if not gantt.write(0, span.start, span.end, number, **style) and 1000 * span.seconds > 11 * gantt.ms_per_px:
            gantt.plot.text(500 * (span.start + span.end), 0, number, rotation=90, ha="center", va="center", **style)
    for batch in run.batches:
        _frame(gantt, batch.began, batch.finished, run.lanes.index(batch.lane), str(batch.number))
    _explain_late(gantt, run, run.late, idle_reason)
    gantt.plot.set_yticks(range(len(run.lanes)), run.lanes)
    gantt.plot.set_ylim(len(run.lanes) - 0.5, -1.5)


def _frame(gantt: Gantt, start: float, stop: float, y: float, number: str) -> None:
    """A frame around the work on a batch, with the batch's number at its left end."""
    gantt.boxes(y, [(start, stop)], facecolor="none", edgecolor="black", linewidth=1.1)
    box = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.7, "pad": 1.4}
    label_end = start + LABEL_PX * gantt.ms_per_px / 1000
    if label_end < stop:
        gantt.write(y, start, label_end, number, fontsize=8, bbox=box)


def _explain_late(gantt: Gantt, run: LoaderTrace, number: int, idle_reason: str) -> None:
    """Label the effects of one late file on the other batches."""
    late = next(batch for batch in run.batches if batch.number == number)
    for span in run.named("late"):
        gantt.write(run.lanes.index(span.lane), span.start, span.end, "one file answers late", color="white")
    behind = [b.number for b in run.batches if b.finished < late.taken < b.taken]
    overtaking = [b.number for b in run.batches if b.number > number and b.taken < late.taken]
    if overtaking:
        text = f"batch {number} is late; taken meanwhile, out of order: {_list(overtaking)}"
        queued = [b.number for b in run.batches if b.lane == late.lane and late.number < b.number < max(overtaking)]
        if queued:
            text += f";\nlate too, since they were already in the same worker's queue: {_list(queued)}"
        _bracket(gantt.plot, late.began, late.taken, text)
    elif behind:
        wait = next(wait for wait in run.named("wait") if wait.facts["batch"] == number)
        text = f"waits for batch {number}; finished behind it: {_list(behind)}"
        gantt.write(0, wait.start, wait.end, text, _in_two(text), color="black")
    for y, lane in enumerate(run.lanes[1:], 1):
        busy = sorted((batch.began, batch.finished) for batch in run.batches if batch.lane == lane)
        for (_, start), (stop, _) in itertools.pairwise(busy):
            if late.began < start and stop > late.finished:
                style: dict[str, Any] = {"color": "0.3", "fontstyle": "italic"}
                gantt.write(y, start, stop, idle_reason, _in_two(idle_reason), **style)


def _bracket(plot: Axes, start: float, stop: float, text: str) -> None:
    """A bracket over the main process's lane, with a text above it."""
    y = -0.62
    arrow = {"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "shrinkA": 0, "shrinkB": 0}
    plot.annotate("", (1000 * start, y), (1000 * stop, y), arrowprops=arrow)
    plot.text(1000 * start, y - 0.12, text, ha="left", va="bottom", fontsize=LABEL_SIZE)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join([*map(str, numbers[:MOST_NUMBERS]), *["..."] * (len(numbers) > MOST_NUMBERS)])


def _in_two(text: str) -> str:
    return textwrap.fill(text, len(text) // 2 + 6)
