"""Gantt charts: boxes in lanes over a time axis, with labels where they have room.

``dataloading.timeline`` draws a loader's processes with it, ``ddp.timeline`` a training step's computation and collectives.
Times are given in seconds and drawn in milliseconds; lanes are one unit apart, with lane 0 on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.reporting.run_figures import DPI, new_figure
from common.reporting.spans import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_PX = 1560  # the part of the width that the time axis takes
HEIGHT = 0.8  # of a box, where a lane is 1
LABEL_SIZE = 8
LIGHT = 0.64  # the least brightness of a color with black letters on it


def new_gantt(rows: Sequence[float], height_inches: float, title: str) -> tuple[Figure, list[Axes]]:
    """A figure of charts, one above the other, with one time axis.

    :param rows: relative heights of the charts
    """
    figure, axes = new_figure(len(rows), 1, height_inches, title, height_ratios=rows, sharex=True)
    return figure, list(axes[:, 0])


def save_gantt(path: Path, figure: Figure, legend: Mapping[str, Any]) -> None:
    """Write the figure as PNG, with a legend in two rows below the charts.

    :param legend: for each label a color, or a style of a patch
    """
    from matplotlib.patches import Patch

    styles = {label: style if isinstance(style, dict) else {"facecolor": style} for label, style in legend.items()}
    patches = [Patch(label=label, **style) for label, style in styles.items()]
    columns = -(-len(patches) // 2)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, fontsize=LABEL_SIZE, frameon=False)
    figure.savefig(path)


def text_pixels(text: str) -> float:
    """About the width of a text, or of the longest of its lines: a letter is some 0.6 times as wide as the size of the font."""
    return 0.6 * LABEL_SIZE * DPI / 72 * max(map(len, text.split("\n")))


class Gantt:
    """One chart.

    :param plot: the axes to draw on
    :param end: of the time axis, which begins at 0, in seconds
    :param title: above the chart
    """

    def __init__(self, plot: Axes, end: float, title: str = "") -> None:
        self.plot, self.ms_per_px = plot, 1000 * end / AXIS_PX
        plot.set_title(title, loc="left", fontsize=9, fontweight="bold")
        plot.set_xlim(0, 1000 * end)
        plot.grid(visible=False, axis="y")
        plot.tick_params(axis="y", length=0)
        plot.spines["left"].set_visible(False)

    def boxes(self, lane: float, intervals: Sequence[Interval], **style: Any) -> None:
        """Draw boxes of one style in a lane."""
        spans = [(1000 * start, 1000 * (stop - start)) for start, stop in intervals]
        self.plot.broken_barh(spans, (lane - HEIGHT / 2, HEIGHT), **style)

    def box(self, lane: float, start: float, stop: float, color: Any, *labels: str, **style: Any) -> bool:
        """Draw a box in a lane.

        :param color: also of its edge, if it is hatched
        :param labels: the first that has room in the box is written into it
        :returns: whether one has
        """
        self.boxes(lane, [(start, stop)], **{"facecolor": color, "edgecolor": "white", "linewidth": 0.5, **style})
        return self.write(lane, start, stop, *labels, color=readable_on(color))

    def write(self, lane: float, start: float, stop: float, *labels: str, **style: Any) -> bool:
        """Write the first of the labels that has room into the middle of a box, and return whether one has."""
        room = 1000 * (stop - start) / self.ms_per_px - 4  # pixels
        text = next((label for label in labels if text_pixels(label) < room), "")
        if text:
            look = {"ha": "center", "va": "center", "fontsize": LABEL_SIZE, **style}
            self.plot.text(500 * (start + stop), lane, text, **look)
        return bool(text)


def readable_on(color: Any) -> str:
    """The color of letters on this one."""
    from matplotlib.colors import to_rgba

    red, green, blue, alpha = to_rgba(color)
    brightness = 0.3 * red + 0.59 * green + 0.11 * blue
    return "black" if 1 - alpha * (1 - brightness) > LIGHT else "white"
