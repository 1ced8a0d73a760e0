"""Gantt charts: boxes in lanes over a time axis, with labels where they have room.

``dataloading.timeline`` draws a loader's processes with it, ``ddp.timeline`` a training step's computation and all-reduces.
Times are given in seconds and drawn in milliseconds; lanes are one unit apart, with lane 0 on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

WIDTH_INCHES, DPI = 14.6, 110
AXIS_PX = 1440  # the part of the width that the time axis takes


def new_gantt(
    rows: Sequence[float], height_inches: float, title: str, *, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """A figure of charts, one above the other.

    :param rows: relative heights of the charts
    :param sharex: one time axis for all
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(printable(title), fontsize=12, parse_math=False)
    axes = figure.subplots(len(rows), 1, height_ratios=rows, squeeze=False, sharex=sharex)
    return figure, list(axes[:, 0])


def save_gantt(path: Path, figure: Figure, legend: Sequence[Patch], *, rows: int, fontsize: float) -> None:
    """Write the figure as PNG, with a legend in some rows below the charts."""
    columns = -(-len(legend) // rows)
    figure.legend(handles=legend, loc="outside lower center", ncols=columns, fontsize=fontsize, frameon=False)
    figure.savefig(path, dpi=DPI)


class Gantt:
    """One chart.

    :param plot: the axes to draw on
    :param seconds: the length of the time axis
    :param height: of a box
    :param character_px: estimated width of a character, in pixels per point of the font's size
    """

    def __init__(self, plot: Axes, seconds: float, *, height: float, character_px: float) -> None:
        self.plot, self.height, self._character_px = plot, height, character_px
        self.ms_per_px = 1000 * seconds / AXIS_PX

    def pixels(self, start: float, stop: float) -> float:
        """The width of a time span."""
        return 1000 * (stop - start) / self.ms_per_px

    def text_pixels(self, text: str, size: float) -> float:
        """The estimated width of a text."""
        return self._character_px * size * len(text)

    def boxes(self, lane: float, spans_ms: Sequence[tuple[float, float]], **style: Any) -> None:
        """Draw boxes in a lane.

        :param spans_ms: start and width of each, in milliseconds
        """
        self.plot.broken_barh(spans_ms, (lane - self.height / 2, self.height), **style)

    def box(self, lane: float, start: float, stop: float, **style: Any) -> None:
        """Draw one box in a lane."""
        self.boxes(lane, [(1000 * start, 1000 * (stop - start))], **style)

    def write(self, lane: float, start: float, stop: float, text: str, **style: Any) -> None:
        """Write a text into the middle of a box."""
        self.plot.text(500 * (start + stop), lane, text, ha="center", va="center", **style)

    def time_axis(self) -> None:
        """A grid of times, no frame."""
        self.plot.grid(axis="x", alpha=0.25)
        self.plot.set_axisbelow(True)
        self.plot.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            self.plot.spines[side].set_visible(False)
