"""The figures of the benchmarks: sweeps, stacks of parts, and the values of single rounds, such as paired ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.reporting.run_figures import COLORS, label_ends, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROUND_RATIOS = (1, 2, 5, 10, 20, 50)
STACKED = [
    *(COLORS[number] for number in (0, 6, 1, 7, 3, 4, 5, 2)),
    "#d3d8dc",
]  # dark and light by turns, which stay apart in grey
Curve = Mapping[int, Sequence[float]]  # for each position on the x axis, the values of its runs


def plot_sweep(
    path: Path,
    x_title: str,
    x_values: Sequence[Any],
    panels: Mapping[str, Mapping[str, Curve]],
    *,
    title: str,
    y_title: str = "images/s: median and quartiles of the rounds",
) -> None:
    """Images/s, or another quantity, over one axis, in panels side by side: medians of repeated runs with their quartiles.

    :param x_values: numbers or words, drawn at equal distances
    :param panels: for each panel's title its curves by their names
    """
    figure, axes = new_figure(1, len(panels), 3.6, title)
    for plot, (panel, curves) in zip(axes[0], panels.items(), strict=True):
        ends = {}
        for number, (name, points) in enumerate(curves.items()):
            low, median, high = np.quantile(
                [points[position] for position in sorted(points)], (0.25, 0.5, 0.75), axis=1
            )
            style: dict[str, Any] = {
                "color": COLORS[number % len(COLORS)],
                "marker": "os^Dv"[number % 5],
                "linestyle": "none" if isinstance(x_values[0], str | bool) else "-",
            }
            plot.errorbar(sorted(points), median, [median - low, high - median], markersize=4, capsize=3, **style)
            ends[name] = max(points), median[-1], style["color"]
        plot.set_ylim(bottom=0)
        plot.set_xticks(range(len(x_values)), map(str, x_values))
        plot.set_xlabel(x_title)
        plot.set_title(panel, fontsize=9)
        label_ends(plot, ends)
    axes[0, 0].set_ylabel(y_title)
    figure.savefig(path)


def plot_stacked(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    names: Sequence[Any],
    *,
    x_title: str,
    title: str,
    y_title: str = "",
    line: float = 0.0,
) -> None:
    """Stacked bars in panels side by side: the parts of a whole, which is their sum and stands to the right of the bar.

    :param panels: for each panel's title its parts, from the left, one value per bar; a negative one hangs to the left of 0, and
        a tick in the bar then marks the whole
    :param names: of the bars, from the top
    :param line: a value to compare with, which ``x_title`` explains
    """
    figure, axes = new_figure(1, len(panels), 1.6 + 0.36 * len(names), title, sharey=True)
    bars: dict[str, Any] = {}
    for plot, (panel, parts) in zip(axes[0], panels.items(), strict=True):
        values = np.array(list(parts.values()))
        ends = np.cumsum(np.maximum(values, 0), axis=0), np.cumsum(np.minimum(values, 0), axis=0)
        left = np.where(values > 0, *ends) - values
        for (name, own), begin in zip(parts.items(), left, strict=True):
            color = STACKED[[*bars, name].index(name) % len(STACKED)]
            drawn = plot.barh(range(len(names)), own, 0.66, begin, color=color)
            bars.setdefault(name, drawn)
        whole, hanging = values.sum(axis=0), (values < 0).any(axis=0)
        plot.plot(whole[hanging], np.flatnonzero(hanging), "|", color="black", markersize=16)
        if line:
            plot.axvline(line, color="0.25", linewidth=1, linestyle="--")
        _rows(plot, panel, names, whole, ".2f")
    axes[0, 0].set_ylabel(y_title)
    figure.legend(
        bars.values(),
        bars.keys(),
        title=x_title,
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
    figure.savefig(path)


def plot_rounds(
    path: Path,
    panels: Mapping[str, Mapping[str, list[float]]],
    *,
    title: str,
    x_title: str,
    spec: str = ".2f",
    scale: str = "from zero",
    stacked: bool = False,
    kind: Callable[[str], object] = lambda name: name.partition(",")[0],
) -> None:
    """Medians of paired ratios or of rates, also as numbers, with quartiles, in panels side by side that have the same axis.

    :param panels: for each panel's title the values of its variants, one entry per round; the same variants in all panels
    :param spec: format of a median, such as ``.2f``
    :param scale: whether the axis begins ``"from zero"``; or is ``"near"`` the values, if they differ by percents; or ``"log"``
    :param stacked: whether the panels lie one below the other; then each has its own variants
    :param kind: of a variant, by its name: variants of a kind have the same color
    """
    counts = [len(variants) for variants in panels.values()]
    rows, columns, height = 1, len(panels), 1.2 + 0.34 * counts[0]
    if stacked:
        rows, columns, height = len(panels), 1, 0.7 + 0.36 * sum(counts) + 0.4 * len(panels)
    subplots: dict[str, Any] = {"sharex": True, "sharey": not stacked, "height_ratios": counts if stacked else None}
    figure, axes = new_figure(rows, columns, height, title, **subplots)
    figure.get_layout_engine().set(wspace=0.06)  # type: ignore[union-attr,call-arg]  # apart from the numbers at the left
    colors: dict[object, str] = {}
    edge = 0.0
    for plot, (panel, variants) in zip(axes.flat, panels.items(), strict=True):
        low, medians, high = np.quantile(list(variants.values()), (0.25, 0.5, 0.75), axis=1)
        edge = max(edge, 1.1 * max(high))
        for position, name in enumerate(variants):
            color = colors.setdefault(kind(name), COLORS[len(colors) % len(COLORS)])
            plot.vlines(medians[position], position - 0.3, position + 0.3, color, linewidth=2)
            plot.hlines(position, low[position], high[position], color, linewidth=5, alpha=0.4)
        plot.axvline(1.0, color="0.25", linewidth=1, zorder=0)  # of ratios: as fast
        if scale == "log":
            plot.set_xscale("log")
            plot.minorticks_off()
            plot.set_xticks(ROUND_RATIOS, map(str, ROUND_RATIOS))
        _rows(plot, panel, list(variants), medians, spec)
    if scale == "from zero":
        plot.set_xlim(0, edge)
        plot.locator_params(axis="x", nbins=5)
    figure.supxlabel(f"{x_title} (line: median; bar: quartiles)", fontsize=8)
    figure.savefig(path)


def _rows(plot: Axes, title: str, names: Sequence[Any], numbers: Iterable[float], spec: str) -> None:
    """Name the rows of a panel, and write a number to the right of each."""
    for position, number in enumerate(numbers):
        place = plot.get_yaxis_transform()
        plot.text(1.02, position, format(number, spec), transform=place, va="center", fontsize=8)
    plot.set_yticks(range(len(names)), map(str, names))
    plot.set_ylim(len(names) - 0.4, -0.6)
    plot.tick_params(axis="y", length=0)
    plot.set_title(title, fontsize=9)
