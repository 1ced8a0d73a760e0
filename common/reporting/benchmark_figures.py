"""The figures of the benchmarks: sweeps, stacks of parts, and the values of single rounds, such as paired ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.reporting.run_figures import COLORS, new_figure


def plot_sweep(
    path: Path,
    x_title: str,
    x_values: Sequence[Any],
    curves: Mapping[str, Mapping[int, tuple[list[float], int]]],
    *,
    title: str,
    logarithmic: bool = False,
) -> None:
    """Repeated runs over one axis: their seconds and images/s, medians with quartiles.

    :param x_values: numbers or words, drawn at equal distances
    :param curves: for each curve, by position in ``x_values``, the seconds of its runs and the images in one run
    :param logarithmic: whether the axis of seconds is logarithmic
    """
    figure, axes = new_figure(1, 2, (11, 4.4), title)
    seconds_plot, rate_plot = axes[0]
    for number, (label, points) in enumerate(curves.items()):
        positions = sorted(points)
        seconds = [np.array(points[position][0]) for position in positions]
        style: dict[str, Any] = {
            "color": COLORS[number % len(COLORS)],
            "marker": "os^Dv"[number // len(COLORS) % 5],
            "label": label,
            "linestyle": "none" if isinstance(x_values[0], str | bool) else "-",
            "markersize": 5,
            "capsize": 4,
        }
        rates = [points[position][1] / runs for position, runs in zip(positions, seconds, strict=True)]
        for plot, values in ((seconds_plot, seconds), (rate_plot, rates)):
            low, median, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
            plot.errorbar(positions, median, [median - low, high - median], **style)
    for plot, y_title in ((seconds_plot, "seconds, median and quartiles"), (rate_plot, "images/s")):
        plot.set_xticks(range(len(x_values)), [str(value) for value in x_values])
        plot.set_xlabel(x_title.replace("_", " "))
        plot.set_ylabel(y_title)
        if logarithmic and plot is seconds_plot:
            plot.set_yscale("log")
        else:
            plot.set_ylim(bottom=0)
        plot.grid(alpha=0.25)
    if len(curves) > 1:
        rate_plot.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def plot_stacked(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    x_values: Sequence[Any],
    *,
    y_title: str,
    title: str,
    x_title: str = "",
    line: tuple[float, str] | None = None,
    points: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> None:
    """Stacked bars in panels side by side: for every x, the parts of a whole, which is their sum and stands above the bar.

    :param panels: for each panel's title its parts, from the bottom up, one value per x; a negative one hangs below 0, and a
        tick in the bar then marks the height of the whole
    :param line: a height to compare with, and its label
    :param points: for each panel's title, the totals of other variants, one value per x
    """
    figure, axes = new_figure(1, len(panels), (1.2 + max(4.8, 0.95 * len(x_values) + 2.4) * len(panels), 4.8), title)
    colors: dict[str, Any] = {}
    for plot, (panel, parts) in zip(axes[0], panels.items(), strict=True):
        ends = {1: np.zeros(len(x_values)), -1: np.zeros(len(x_values))}  # of the positive and of the negative parts
        for name, values in parts.items():
            color = colors.setdefault(name, COLORS[len(colors) % len(COLORS)])
            for sign, end in ends.items():
                signed = sign * np.maximum(0, sign * np.array(values))
                plot.bar(range(len(x_values)), signed, 0.62, end, color=color, label=name if sign > 0 else None)
                end += signed
        for position, (height, below) in enumerate(zip(*ends.values(), strict=True)):
            plot.text(position, height, f"{height + below:.2f}", ha="center", va="bottom", fontsize=8.5)
            if below:
                plot.plot(position, height + below, "_", color="black", markersize=30)
        for number, (name, values) in enumerate((points or {}).get(panel, {}).items()):
            plot.plot(range(len(x_values)), values, "Dos"[number % 3], color="black", markersize=5, label=name)
        if line is not None:
            plot.axhline(line[0], color="0.25", linewidth=1, linestyle="--", label=line[1])
        plot.set_xticks(range(len(x_values)), [str(value) for value in x_values], fontsize=8)
        plot.set_title(panel, fontsize=10)
        plot.set_xlabel(x_title)
        plot.set_ylabel(y_title)
        handles, labels = plot.get_legend_handles_labels()
        plot.legend(handles[::-1], labels[::-1], fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)


def plot_rounds(
    path: Path,
    panels: Mapping[str, Mapping[str, list[float]]],
    *,
    title: str,
    x_title: str,
    spec: str = ".2f",
    from_zero: bool = True,
) -> None:
    """Paired ratios or rates in panels side by side: a dot per round and variant, the median and quartiles, and a line at 1.

    Variants whose names are equal up to a comma have the same color.

    :param panels: for each panel's title the values of its variants, one entry per round
    :param spec: format of a median, such as ``.2f``
    :param from_zero: whether the axis begins at 0; not where the values differ by percents
    """
    names = [list(variants) for variants in panels.values()]
    shared = all(one == names[0] for one in names)  # then the leftmost panel names the variants of all
    width = 8.0 if len(panels) == 1 else 2 + (2.8 if shared else 4.4) * len(panels)
    figure, axes = new_figure(1, len(panels), (width, 1.6 + 0.46 * max(map(len, names))), title, sharey=shared)
    colors: dict[str, str] = {}
    for plot, (panel, variants) in zip(axes[0], panels.items(), strict=True):
        edge = 0.0
        for position, (name, values) in enumerate(variants.items()):
            color = colors.setdefault(name.partition(",")[0], COLORS[len(colors) % len(COLORS)])
            low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
            edge = max(edge, 1.25 * high)
            spread = position + np.linspace(-0.18, 0.18, len(values))
            plot.plot(values, spread, "o", color=color, alpha=0.35, markersize=3.5)
            plot.plot([median, median], [position - 0.25, position + 0.25], color=color, linewidth=2.5)
            plot.plot([low, high], [position, position], color=color, linewidth=2)
            box = {"facecolor": "white", "linewidth": 0, "pad": 0.5}
            plot.text(median, position - 0.26, format(median, spec), ha="center", va="bottom", fontsize=8, bbox=box)
        plot.axvline(1.0, color="0.25", linewidth=1, zorder=0)
        plot.set_yticks(range(len(variants)), list(variants))
        plot.set_ylim(len(variants) - 0.5, -0.7)
        if from_zero:
            plot.set_xlim(0, edge)  # a disturbed round may lie beyond
        plot.tick_params(axis="y", length=0)
        plot.set_title(panel, fontsize=10)
        plot.grid(axis="x", alpha=0.25)
    figure.supxlabel(x_title, fontsize=10)
    figure.savefig(path, dpi=110)
