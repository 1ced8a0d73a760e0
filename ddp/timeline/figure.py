"""The picture of a training step: what a rank computes, its all-reduces below, and then the next rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.reporting.gantt import AXIS_PX, DPI, Gantt, new_gantt, save_gantt
from common.reporting.run_figures import COLORS
from ddp.by_hand.buckets import MIB
from ddp.timeline.overlap import OverlapParts, sent_by_all
from ddp.timeline.recording import Sending, Step

if TYPE_CHECKING:
    from matplotlib.patches import Patch

CHARACTER_PX = 0.9  # width, per point of the font's size
NAME_PX = 19  # between two names of gradients
NAME_SIZE, NAME_ANGLE, LABEL_SIZE = 7.5, 35, 9
ROW_INCHES = 0.52
HEIGHT = 0.8  # of a box, where a row is 1
BUCKET_COLORS = (COLORS[0], COLORS[2], COLORS[3], COLORS[4])
DATA, FORWARD, COPY, WAIT, OPTIMIZER = "#d9dde0", "#a9b8c4", "0.25", "#f3c3b2", COLORS[5]
LATE, HIDDEN, EXPOSED = "0.9", "#e7f2e6", "#fbe3da"


def plot_step(
    path: Path,
    ranks: Sequence[Step],
    parts: Sequence[OverlapParts],
    parameters: Sequence[str],
    buckets: Sequence[Mapping[str, int]],
    title: str,
) -> None:
    """Draw one step on all ranks.

    :param ranks: its moments on each; :param parts: how long each part took there
    :param parameters: in the order of :attr:`Step.ready`
    :param buckets: in the order in which they are sent: for each of its parameters, the gradient's bytes
    """
    origin, end = min(step.began for step in ranks), max(step.ended for step in ranks)
    drawings = [_Drawing(step.since(origin), parameters, buckets, end - origin) for step in ranks]
    heights = [drawing.bottom - drawing.top for drawing in drawings]
    height_inches = 1.2 + 0.3 * len(ranks) + ROW_INCHES * sum(heights)
    figure, axes = new_gantt(heights, height_inches, title, sharex=True)
    moments = [moment - origin for moment in sent_by_all(ranks)]
    for rank, (plot, drawing, its) in enumerate(zip(axes, drawings, parts, strict=True)):
        chart = Gantt(plot, end - origin, height=HEIGHT, character_px=CHARACTER_PX)
        drawing.compute(chart)
        drawing.all_reduces(chart, moments)
        plot.set_title(f"rank {rank}: {_summary(its)}", loc="left", fontsize=11, fontweight="bold")
        plot.set_xlim(0, 1000 * (end - origin))
    axes[-1].set_xlabel(
        "ms since the first rank began the step.  Ticks: a gradient is ready, its computation in the color of its bucket; "
        "named where there is room"
    )
    save_gantt(path, figure, _legend(buckets), rows=2, fontsize=9)


def lanes(sent: Sequence[Sending]) -> list[int]:
    """For each all-reduce the first of several lanes in which it overlaps none before."""
    free: list[float] = []
    chosen = []
    for sending in sent:
        lane = next((lane for lane, moment in enumerate(free) if moment <= sending.started), len(free))
        free[lane : lane + 1] = [sending.ended]
        chosen.append(lane)
    return chosen


class _Drawing:
    """One rank's rows: 0 is what it computes, with the names of gradients above; its all-reduces are below.

    :param step: in seconds from the left edge
    :param parameters: see :func:`plot_step`
    :param buckets: see :func:`plot_step`
    :param seconds: the length of the time axis
    """

    def __init__(
        self, step: Step, parameters: Sequence[str], buckets: Sequence[Mapping[str, int]], seconds: float
    ) -> None:
        self._step, self._buckets, self._seconds = step, buckets, seconds
        self._ready = dict(zip(parameters, step.ready, strict=True))
        self._lanes, self._named = lanes(step.sent), self._choose_names()
        longest = CHARACTER_PX * NAME_SIZE * max(map(len, self._named))
        self.top = -0.6 - longest * math.sin(math.radians(NAME_ANGLE)) / (ROW_INCHES * DPI)
        self.bottom = 1.6 + max(self._lanes)

    def compute(self, chart: Gantt) -> None:
        """Row 0, and the names."""
        step, plot = self._step, chart.plot
        _box(chart, 0, step.began, step.loaded, DATA)
        _box(chart, 0, step.loaded, step.forwarded, FORWARD, "forward")
        bucket_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket}
        began = step.forwarded
        for (name, ready), handled in sorted(
            zip(self._ready.items(), step.handled, strict=True), key=lambda one: one[1]
        ):
            _box(chart, 0, began, ready, _color(bucket_of[name]), alpha=0.75)
            _box(chart, 0, ready, handled, COPY, linewidth=0)
            began = handled
        _box(chart, 0, began, step.returned, WAIT, "waits")
        _box(chart, 0, step.returned, step.ended, OPTIMIZER, "optimizer")
        top = -HEIGHT / 2
        for moment in step.ready:
            plot.plot([1000 * moment] * 2, [top - 0.12, top], color="0.3", linewidth=0.8)
        style: dict[str, Any] = {"rotation": NAME_ANGLE, "rotation_mode": "anchor", "fontsize": NAME_SIZE}
        for name in self._named:
            plot.text(1000 * self._ready[name], top - 0.16, name, color="0.25", **style)

    def all_reduces(self, chart: Gantt, moments: Sequence[float]) -> None:
        """The other rows, and the axes.

        :param moments: at which each bucket is sent by all ranks
        """
        step, plot, top, height = self._step, chart.plot, 0.5, 1 + max(self._lanes)
        for start, stop, color in ((step.forwarded, step.computed, HIDDEN), (step.computed, step.returned, EXPOSED)):
            box = [(1000 * start, 1000 * (stop - start))]
            plot.broken_barh(box, (top, height), color=color, linewidth=0, zorder=0.1)
        for number, (sending, moment) in enumerate(zip(step.sent, moments, strict=True)):
            x, y, color, name = 1000 * sending.started, 1 + self._lanes[number], _color(number), f"bucket {number + 1}"
            plot.plot([x, x], [HEIGHT / 2, y - HEIGHT / 2], color=color, linewidth=1.5, zorder=0.2)
            _box(chart, y, sending.started, moment, LATE, hatch="////", edgecolor=color)
            sized = f"{name}: {_mib(self._buckets[number])}"
            _box(chart, y, moment, sending.ended, color, sized, name, str(number + 1))
        plot.set_yticks([0, top + height / 2], ["computes", "all-reduce"])
        plot.set_ylim(self.bottom, self.top)
        chart.time_axis()

    def _choose_names(self) -> list[str]:
        """Of the gradients: the largest, and then those that do not come too close to a larger one."""
        nbytes = {name: size for bucket in self._buckets for name, size in bucket.items()}
        named: list[str] = []
        for name in sorted(self._ready, key=lambda name: -nbytes[name]):
            distances_s = (abs(self._ready[name] - self._ready[other]) for other in named)
            if all(distance * AXIS_PX > NAME_PX * self._seconds for distance in distances_s):
                named.append(name)
        return named


def _box(chart: Gantt, y: float, start: float, stop: float, color: str, *labels: str, **style: Any) -> None:
    """A box with the first of the labels that has room in it."""
    chart.box(y, start, stop, **{"edgecolor": "white", "linewidth": 0.5, "facecolor": color, **style})
    room = chart.pixels(start, stop)
    text = next((label for label in labels if chart.text_pixels(label, LABEL_SIZE) < room), "")
    chart.write(y, start, stop, text, fontsize=LABEL_SIZE, color="black" if color in (WAIT, FORWARD) else "white")


def _summary(its: OverlapParts) -> str:
    late = f"; {_ms(its.waiting)} wait for the slowest rank" if its.waiting > 0.005 * its.step else ""
    return (
        f"step {_ms(its.step)}, all-reduce {_ms(its.all_reduce)}, of which {_ms(its.hidden)} hidden and "
        f"{_ms(its.exposed)} exposed{late}"
    )


def _legend(buckets: Sequence[Mapping[str, int]]) -> list[Patch]:
    from matplotlib.patches import Patch

    of_buckets = []
    for first, color in enumerate(BUCKET_COLORS[: len(buckets)]):
        same = [str(number + 1) for number in range(first, len(buckets), len(BUCKET_COLORS))]
        several = f"buckets {', '.join(same[:2])}{', ...' * (len(same) > 2)}"
        label = several if len(same) > 1 else f"bucket {first + 1}: {_mib(buckets[first])}"
        of_buckets.append(Patch(color=color, label=label))
    return [
        Patch(color=DATA, label="data"),
        Patch(color=FORWARD, label="forward"),
        *of_buckets,
        Patch(color=COPY, label="copied to its bucket, sent"),
        Patch(facecolor=LATE, edgecolor="0.4", hatch="////", label="sent, but not yet by the slowest rank"),
        Patch(color=WAIT, label="waits"),
        Patch(color=OPTIMIZER, label="optimizer"),
        Patch(color=HIDDEN, label="all-reduce is hidden here"),
        Patch(color=EXPOSED, label="and exposed here"),
    ]


def _color(bucket: int) -> str:
    return BUCKET_COLORS[bucket % len(BUCKET_COLORS)]


def _mib(bucket: Mapping[str, int]) -> str:
    return f"{sum(bucket.values()) / MIB:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
