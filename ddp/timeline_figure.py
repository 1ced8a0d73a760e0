"""The picture of a training step: what a rank computes, its all-reduces below, and then the next rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.plotting import COLORS
from ddp.buckets import MIB
from ddp.overlap import Parts
from ddp.recording import Sending, Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES, DPI = 14.6, 110
AXIS_PX = 1440  # of the width, what the time axis takes
CHARACTER_PX = 0.9  # width, per point of the font's size
NAME_PX = 19  # between two names of gradients
NAME_SIZE, NAME_ANGLE = 7.5, 35
ROW_INCHES = 0.52
HEIGHT = 0.8  # of a box, where a row is 1
BUCKET_COLORS = (COLORS[0], COLORS[2], COLORS[3], COLORS[4])
FORWARD, WAIT, OPTIMIZER, DATA = "#a9b8c4", "#f3c3b2", COLORS[5], "#d9dde0"
HIDDEN, EXPOSED = "#e7f2e6", "#fbe3da"


def plot_step(
    path: Path,
    ranks: Sequence[Step],
    parts: Sequence[Parts],
    parameters: Sequence[str],
    buckets: Sequence[Mapping[str, int]],
    title: str,
) -> None:
    """Draw one step on all ranks.

    :param ranks: its moments on each; :param parts: how long each part took there
    :param parameters: in the order of :attr:`Step.ready`
    :param buckets: in the order in which they are sent: for each of its parameters, the gradient's bytes
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    origin, end = min(step.began for step in ranks), max(step.ended for step in ranks)
    moments = [step.since(origin) for step in ranks]
    scale = 1000 * (end - origin) / AXIS_PX
    names = [_named(dict(zip(parameters, step.ready, strict=True)), buckets, scale) for step in moments]
    tops = [0.6 + _rise(max(map(len, named))) for named in names]
    bottoms = [1.6 + max(lanes(step.sent)) for step in ranks]
    heights = [top + bottom for top, bottom in zip(tops, bottoms, strict=True)]
    figure = Figure(figsize=(WIDTH_INCHES, 1.2 + 0.3 * len(ranks) + ROW_INCHES * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(len(ranks), 1, height_ratios=heights, squeeze=False, sharex=True)[:, 0]
    all_sent = [max(sending.started for sending in bucket) for bucket in zip(*(s.sent for s in moments), strict=True)]
    for rank, (plot, step, its) in enumerate(zip(axes, moments, parts, strict=True)):
        drawing = _Drawing(plot, scale)
        drawing.compute(step, parameters, buckets)
        drawing.names(names[rank])
        drawing.all_reduces(step, all_sent, buckets)
        title = (
            f"rank {rank}: step {_ms(its.step)}, all-reduce {_ms(its.all_reduce)}, of which {_ms(its.hidden)} hidden and "
            f"{_ms(its.exposed)} exposed"
        )
        if its.waiting > 0.005 * its.step:
            title += f"; {_ms(its.waiting)} wait for the slowest rank"
        plot.set_title(title, loc="left", fontsize=11, fontweight="bold")
        plot.set_xlim(0, 1000 * (end - origin))
        plot.set_ylim(bottoms[rank], -tops[rank])
    axes[-1].set_xlabel(
        "ms since the first rank began the step.  Ticks: a gradient is ready, its computation in the color of its bucket; "
        "named where there is room"
    )
    colors = BUCKET_COLORS[: len(buckets)]
    legend = [
        Patch(color=DATA, label="data"),
        Patch(color=FORWARD, label="forward"),
        *(Patch(color=color, label=_legend(buckets, number)) for number, color in enumerate(colors)),
        Patch(color="0.25", label="copied into its bucket"),
        Patch(facecolor="0.9", edgecolor="0.4", hatch="////", label="sent, but not yet by the slowest rank"),
        Patch(color=WAIT, label="waits"),
        Patch(color=OPTIMIZER, label="optimizer"),
        Patch(color=HIDDEN, label="all-reduce is hidden here"),
        Patch(color=EXPOSED, label="and exposed here"),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=-(-len(legend) // 2), fontsize=9, frameon=False)
    figure.savefig(path, dpi=DPI)


def lanes(sent: Sequence[Sending]) -> list[int]:
    """For each all-reduce the first of several lanes in which it overlaps none before."""
    free: list[float] = []
    chosen = []
    for sending in sent:
        lane = next((lane for lane, moment in enumerate(free) if moment <= sending.started), len(free))
        free[lane : lane + 1] = [sending.ended]
        chosen.append(lane)
    return chosen


def _named(ready: Mapping[str, float], buckets: Sequence[Mapping[str, int]], scale: float) -> dict[str, float]:
    """The gradients of which the name has room: the largest first, and then those that do not come too close to them."""
    nbytes = {name: size for bucket in buckets for name, size in bucket.items()}
    named: dict[str, float] = {}
    for name in sorted(ready, key=lambda name: -nbytes[name]):
        if all(1000 * abs(ready[name] - other) > NAME_PX * scale for other in named.values()):
            named[name] = ready[name]
    return named


def _rise(letters: int) -> float:
    """Rows that a name takes in height."""
    return CHARACTER_PX * NAME_SIZE * letters * math.sin(math.radians(NAME_ANGLE)) / (ROW_INCHES * DPI)


class _Drawing:
    """One rank's rows: 0 is what it computes, the all-reduces are below.

    :param scale: milliseconds per pixel
    """

    def __init__(self, plot: Axes, scale: float) -> None:
        self._plot, self._scale = plot, scale

    def compute(self, step: Step, parameters: Sequence[str], buckets: Sequence[Mapping[str, int]]) -> None:
        self._box(0, step.began, step.loaded, DATA)
        self._box(0, step.loaded, step.forwarded, FORWARD, "forward")
        bucket_of = {name: number for number, bucket in enumerate(buckets) for name in bucket}
        began = step.forwarded
        ready = [(moment, bucket_of[name], True) for name, moment in zip(parameters, step.ready, strict=True)]
        sent = [(sending.started, number, False) for number, sending in enumerate(step.sent)]
        for moment, bucket, is_gradient in sorted(ready + sent):
            self._box(0, began, moment, _color(bucket) if is_gradient else "0.25", alpha=0.75 if is_gradient else 1.0)
            began = moment
        self._box(0, began, step.returned, WAIT, "waits")
        self._box(0, step.returned, step.ended, OPTIMIZER, "optimizer")
        for moment in step.ready:
            self._plot.plot([1000 * moment] * 2, [-HEIGHT / 2 - 0.12, -HEIGHT / 2], color="0.3", linewidth=0.8)

    def names(self, named: Mapping[str, float]) -> None:
        """Of gradients, above the moments at which they are ready."""
        style: dict[str, Any] = {"rotation": NAME_ANGLE, "rotation_mode": "anchor", "fontsize": NAME_SIZE}
        for name, moment in named.items():
            self._plot.text(1000 * moment, -HEIGHT / 2 - 0.16, name, color="0.25", **style)

    def all_reduces(self, step: Step, all_sent: Sequence[float], buckets: Sequence[Mapping[str, int]]) -> None:
        chosen = lanes(step.sent)
        top, height = 0.5, 1 + max(chosen)
        for start, stop, color in ((step.forwarded, step.computed, HIDDEN), (step.computed, step.returned, EXPOSED)):
            box = [(1000 * start, 1000 * (stop - start))]
            self._plot.broken_barh(box, (top, height), color=color, linewidth=0, zorder=0.1)
        for number, (sending, everywhere, lane) in enumerate(zip(step.sent, all_sent, chosen, strict=True)):
            y, color, name = 1 + lane, _color(number), f"bucket {number + 1}"
            x = 1000 * sending.started
            self._plot.plot([x, x], [HEIGHT / 2, y - HEIGHT / 2], color=color, linewidth=1.5, zorder=0.2)
            self._box(y, sending.started, everywhere, "0.9", hatch="////", edgecolor=color)
            sized = f"{name}: {_mib(buckets[number])}"
            self._box(y, everywhere, sending.ended, color, sized, name, str(number + 1))
        self._plot.set_yticks([0, 0.5 + height / 2], ["computes", "all-reduce"])
        self._plot.tick_params(axis="y", length=0)
        self._plot.grid(axis="x", alpha=0.25)
        self._plot.set_axisbelow(True)
        for side in ("top", "right", "left"):
            self._plot.spines[side].set_visible(False)

    def _box(self, y: float, start: float, stop: float, color: str, *labels: str, **style: Any) -> None:
        """A box with the first of the labels that has room in it."""
        style = {"edgecolor": "white", "linewidth": 0.5, "facecolor": color, **style}
        self._plot.broken_barh([(1000 * start, 1000 * (stop - start))], (y - HEIGHT / 2, HEIGHT), **style)
        room = 1000 * (stop - start) / self._scale
        text = next((label for label in labels if CHARACTER_PX * 9 * len(label) < room), "")
        text_color = "black" if color in (WAIT, FORWARD) else "white"
        self._plot.text(500 * (start + stop), y, text, ha="center", va="center", fontsize=9, color=text_color)


def _color(bucket: int) -> str:
    return BUCKET_COLORS[bucket % len(BUCKET_COLORS)]


def _legend(buckets: Sequence[Mapping[str, int]], first: int) -> str:
    """The buckets that have the color of the first."""
    same = [str(number + 1) for number in range(first, len(buckets), len(BUCKET_COLORS))]
    if len(same) == 1:
        return f"bucket {same[0]}: {_mib(buckets[first])}"
    return f"buckets {', '.join(same[:2])}{', ...' * (len(same) > 2)}"


def _mib(bucket: Mapping[str, int]) -> str:
    return f"{sum(bucket.values()) / MIB:.1f} MiB"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
