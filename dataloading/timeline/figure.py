"""The timeline's picture: a lane per process or thread, a curve of the queue, and one batch in close-up."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.reporting.gantt import Gantt, new_gantt, save_gantt
from common.reporting.run_figures import COLORS
from common.reporting.trace_events import Lane
from dataloading.timeline.tracing import BatchTimes, LoaderTrace, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT = 0.74  # of a box, where a lane is 1
CHARACTER_PX = 0.77  # width, per point of the font's size


class Style(NamedTuple):
    """A stage's label in the legend, and its color."""

    label: str
    color: str


STARTING, READING = Style("starting workers", "#d3d8dc"), Style("open + read", COLORS[4])
STYLES = {
    "start workers": STARTING,
    "start": STARTING,
    "wait": Style("main process waits", "#f9ddd3"),
    "consume": Style("main process works on a batch", COLORS[5]),
    "open": READING,
    "read": READING,
    "late": Style("a file answers late", COLORS[1]),
    "decode": Style("decode", COLORS[0]),
    "resize": Style("resize", "#7db3da"),
    "augment": Style("augment", COLORS[3]),
    "transform": Style("to tensor", COLORS[2]),
    "collate": Style("collate", "#6b4b3a"),
}


def plot_timeline(path: Path, runs: Sequence[LoaderTrace], title: str, idle_reason: str) -> None:
    """Draw the runs one above the other on one time axis, and a batch of the first run in close-up.

    :param path: of the PNG
    :param idle_reason: why a worker is idle while the main process waits for another worker's batch
    """
    from matplotlib.patches import Patch

    close_up = _typical(runs[0])
    heights = [*([1.0 + len(runs[0].lanes), 0.9] * len(runs)), 0.5 + len(_workers_of(runs[0], close_up.number))]
    figure, axes = new_gantt(heights, 2.6 + 0.5 * sum(heights), title)
    end = max(run.end for run in runs)
    for i, run in enumerate(runs):
        _draw_run(_chart(axes[2 * i], end), run, end, idle_reason)
        _draw_queue(axes[2 * i + 1], run, end)
    _explain_first(axes[0], runs[0])
    axes[2 * len(runs) - 1].set_xlabel("ms since the main process asked for the loader's iterator")
    _draw_close_up(_chart(axes[-1], close_up.taken - close_up.began), runs[0], close_up)
    seen = {STYLES[span.name] for run in runs for span in run.spans if span.name in STYLES}
    patches = [Patch(color=style.color, label=style.label) for style in dict.fromkeys(STYLES.values()) if style in seen]
    save_gantt(path, figure, patches, rows=1, fontsize=9.5)


def _chart(plot: Axes, seconds: float) -> Gantt:
    return Gantt(plot, seconds, height=HEIGHT, character_px=CHARACTER_PX)


def _draw_run(chart: Gantt, run: LoaderTrace, end: float, idle_reason: str) -> None:
    plot = chart.plot
    _draw_spans(chart, run.spans, list(run.lanes))
    for span in run.spans:
        if span.name == "consume":
            _number_consumed(chart, span)
    for y, lane in enumerate(run.lanes):
        for batch, start, stop in _frames(run, lane):
            _frame(chart, start, stop, y, batch)
    if run.late is not None:
        _explain_late(chart, run, run.late, idle_reason)
    plot.set_title(run.title, loc="left", fontsize=11, fontweight="bold")
    _time_axis(chart, 0, end)
    plot.set_yticks(range(len(run.lanes)), list(run.lanes.values()))
    plot.set_ylim(len(run.lanes) - 0.5, -1.5)
    plot.tick_params(labelbottom=False)


def _draw_spans(chart: Gantt, spans: Sequence[Span], lanes: Sequence[Lane]) -> None:
    """Every span as a box in its lane, with inner spans drawn over outer ones."""
    boxes: dict[tuple[str, Lane], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span.name in STYLES:
            boxes[span.name, span.lane].append((1000 * span.start, 1000 * (span.end - span.start)))
    for name, style in STYLES.items():
        for y, lane in enumerate(lanes):
            # Without snapping to pixels, boxes narrower than a pixel blend; with it, the last one would hide the others.
            merged = _merged(boxes[name, lane], 0.1 * chart.ms_per_px)
            chart.boxes(y, merged, color=style.color, linewidth=0, snap=False)


def _merged(boxes: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The boxes as (start, width), joined where less than ``gap`` separates them."""
    merged: list[tuple[float, float]] = []
    for start, width in boxes:
        if merged and start - sum(merged[-1]) < gap:
            merged[-1] = merged[-1][0], start + width - merged[-1][0]
        else:
            merged.append((start, width))
    return merged


def _number_consumed(chart: Gantt, span: Span) -> None:
    """Write the batch's number into the box: upright if it has room, else turned."""
    text, room = str(span.batch), chart.pixels(span.start, span.end)
    upright = room > chart.text_pixels(text, 8)
    if upright or room > 9:
        chart.write(0, span.start, span.end, text, color="white", fontsize=8, rotation=0 if upright else 90)


def _frames(run: LoaderTrace, lane: Lane) -> list[tuple[int, float, float]]:
    """For each batch that the lane worked on: its number, start and end."""
    found: dict[int, list[Span]] = defaultdict(list)
    for span in run.spans:
        if span.lane == lane and span.name in ("fetch", "collate") and span.batch is not None:
            found[span.batch].append(span)
    return [(batch, spans[0].start, max(span.end for span in spans)) for batch, spans in found.items()]


def _workers_of(run: LoaderTrace, batch: int) -> dict[Lane, str]:
    """The lanes that worked on a batch."""
    who = {span.lane for span in run.work(batch)}
    return {lane: name for lane, name in run.lanes.items() if lane in who}


def _frame(chart: Gantt, start: float, stop: float, y: float, batch: int) -> None:
    """A frame around a worker's part of a batch, with the batch's number."""
    from matplotlib.patches import Rectangle

    corner = 1000 * start, y - HEIGHT / 2
    chart.plot.add_patch(Rectangle(corner, 1000 * (stop - start), HEIGHT, fill=False, linewidth=1.1, edgecolor="black"))
    text = str(batch)
    if chart.pixels(start, stop) > chart.text_pixels(text, 8) + 4:
        box = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.7, "pad": 1.4}
        offset = (chart.text_pixels(text, 8) / 2 + 3) * chart.ms_per_px
        chart.plot.text(corner[0] + offset, y, text, ha="center", va="center", fontsize=8, bbox=box)


def _explain_first(plot: Axes, run: LoaderTrace) -> None:
    first = run.batches[0]
    parts = (
        f"{_ms(first.finished - first.began)} work on the whole batch, {_ms(first.taken - first.finished)} hand-over"
    )
    helpers = len(_workers_of(run, first.number))
    if helpers > 1:
        parts += f"; {helpers} threads share it"
    elif len(run.lanes) > 2:
        parts = f"{_ms(first.began)} until its worker has started and been asked, {parts};\n"
        parts += "no other worker helps with it, since a batch is given to one worker as a whole"
    _bracket(plot, 0, first.taken, f"first batch after {_ms(first.taken)}: {parts}")


def _explain_late(chart: Gantt, run: LoaderTrace, late_number: int, idle_reason: str) -> None:
    """Label the effects of one late file on the other batches."""
    late = next(batch for batch in run.batches if batch.number == late_number)
    lanes = list(run.lanes)
    for span in run.spans:
        if span.name == "late":
            _write(chart, span.start, span.end, lanes.index(span.lane), "one file answers late", color="white")
    behind = [b.number for b in run.batches if b.finished < late.taken < b.taken]
    overtaking = [b.number for b in run.batches if b.number > late_number and b.taken < late.taken]
    if behind and not overtaking:
        wait = next(wait for wait in run.waits if wait.batch == late_number)
        text = f"waits for batch {late_number}, while {_list(behind)} {_is(behind)} finished behind it"
        _write(chart, wait.start, wait.end, 0, text)
    if overtaking:
        text = f"batch {late_number} is late: {_list(overtaking)} {_is(overtaking)} taken meanwhile, out of order"
        queued = [
            b.number for b in run.batches if b.lane == late.lane and late.began < b.began and b.number < max(overtaking)
        ]
        if queued:
            text += f";\n{_list(queued)} {_is(queued)} late too: already in the same worker's queue"
        _bracket(chart.plot, late.began, late.taken, text)
    for y, lane in enumerate(lanes[1:], 1):
        for start, stop in _gaps(run, lane):
            if late.began < start and stop > late.finished:
                _write(chart, start, stop, y, idle_reason, color="0.3", fontstyle="italic")


def _gaps(run: LoaderTrace, lane: Lane) -> list[tuple[float, float]]:
    """The times between two batches of a worker."""
    frames = _frames(run, lane)
    return [(end, start) for (_, _, end), (_, start, _) in itertools.pairwise(frames)]


def _bracket(plot: Axes, start: float, stop: float, text: str) -> None:
    """A bracket over the main process's lane, with a text above it."""
    y = -0.62
    plot.annotate(
        "",
        (1000 * start, y),
        (1000 * stop, y),
        arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "shrinkA": 0, "shrinkB": 0},
    )
    plot.text(1000 * start, y - 0.12, text, ha="left", va="bottom", fontsize=9)


def _write(chart: Gantt, start: float, stop: float, y: float, text: str, **style: Any) -> None:
    """Write into the middle of a box, in one line or two, if it has room."""
    size, room = 9, chart.pixels(start, stop) - 24
    for count in (1, 2):
        lines = textwrap.wrap(text, math.ceil(len(text) / count) + 5)
        if len(lines) <= count and max(chart.text_pixels(line, size) for line in lines) < room:
            chart.write(y, start, stop, "\n".join(lines), fontsize=size, **style)
            break


def _draw_queue(plot: Axes, run: LoaderTrace, end: float) -> None:
    from matplotlib.ticker import MaxNLocator

    moments, waiting = zip(*((1000 * moment, count) for moment, count in run.queue()), strict=True)
    plot.fill_between(moments, waiting, step="post", color=COLORS[3], alpha=0.3, linewidth=0)
    plot.step(moments, waiting, where="post", color=COLORS[3], linewidth=1.2)
    _time_axis(_chart(plot, end), 0, end)
    plot.set_ylim(0, max(waiting) + 0.6)
    plot.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    plot.set_ylabel("batches finished,\nnot yet taken", rotation=0, ha="right", va="center", fontsize=9)


def _typical(run: LoaderTrace) -> BatchTimes:
    """The batch for the close-up: of those that most lanes worked on, the one of median duration."""
    shares = {batch: len(_workers_of(run, batch.number)) for batch in run.batches}
    widest = [batch for batch in run.batches if shares[batch] == max(shares.values())]
    by_work = sorted(widest, key=lambda batch: batch.finished - batch.began)
    return by_work[(len(by_work) - 1) // 2]


def _draw_close_up(chart: Gantt, run: LoaderTrace, batch: BatchTimes) -> None:
    plot, lanes = chart.plot, _workers_of(run, batch.number)
    spans = [span for span in run.spans if span.batch == batch.number and span.lane in lanes and span.name != "consume"]
    _draw_spans(chart, spans, list(lanes))
    who = "the threads share it" if len(lanes) > 1 else "one image after the other"
    title = (
        f"batch {batch.number} in close-up: {who}, {_ms(batch.finished - batch.began)} "
        "(above, stages shorter than a pixel blend)"
    )
    plot.set_title(title, loc="left", fontsize=11, fontweight="bold")
    _time_axis(chart, batch.began, batch.finished)
    plot.set_yticks(range(len(lanes)), list(lanes.values()))
    plot.set_ylim(len(lanes) - 0.5, -0.5)
    plot.set_xlabel("ms")


def _time_axis(chart: Gantt, start: float, end: float) -> None:
    chart.plot.set_xlim(1000 * start, 1000 * end)
    chart.time_axis()


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"


def _list(numbers: Sequence[int], most: int = 12) -> str:
    """``3, 5 and 6``."""
    words = [str(number) for number in numbers[:most]] + (["more"] if len(numbers) > most else [])
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _is(numbers: Sequence[int]) -> str:
    return "is" if len(numbers) == 1 else "are"
