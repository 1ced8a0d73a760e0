"""The figure of ``ddp.bench allreduce``: the algorithms over the tensor's size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.reporting.run_figures import COLORS, new_figure


def plot_all_reduce(
    path: Path,
    seconds: Mapping[str, Mapping[int, list[float]]],
    lines: Mapping[str, tuple[float, float]],
    bandwidths: Mapping[str, Mapping[int, float]],
    limit: float | None,
    sizes: Mapping[int, str],
    title: str,
) -> None:
    """All-reduce algorithms over the size of the tensor: time with the fitted line, and bus bandwidth.

    :param seconds: for each algorithm, by size in bytes, its seconds, one entry per round
    :param lines: for each algorithm, alpha in seconds and beta in seconds per byte: alpha + beta * bytes
    :param bandwidths: for each algorithm, by size, bytes per second
    :param limit: the bus bandwidth that memory allows, in bytes per second; None draws none
    :param sizes: the name of each size, from the smallest to the largest
    """
    figure, axes = new_figure(1, 2, (14, 6), title)
    time_plot, bandwidth_plot = axes[0]
    curve = np.geomspace(min(sizes), max(sizes), 200)
    colors = (COLORS[5], *COLORS[:5], "#c0271a", "#7fb8a0")
    for number, (name, times) in enumerate(seconds.items()):
        style: dict[str, Any] = {"color": colors[number % 8], "marker": "os^DvPX*"[number % 8], "markersize": 5}
        low, median, high = 1e6 * np.quantile(list(times.values()), (0.25, 0.5, 0.75), axis=1)
        time_plot.errorbar(list(times), median, [median - low, high - median], linestyle="none", capsize=3, **style)
        alpha, beta = lines[name]
        time_plot.plot(curve, 1e6 * (alpha + beta * curve), color=style["color"], linewidth=1)
        values = [1e-9 * value for value in bandwidths[name].values()]
        bandwidth_plot.plot(list(bandwidths[name]), values, linewidth=1.4, label=name, **style)
    if limit is not None:
        words = "memory bandwidth limit\n(without caches)"
        bandwidth_plot.axhline(1e-9 * limit, color="0.25", linewidth=1, linestyle="--", label=words)
    time_plot.set_ylabel("us per all-reduce: median, quartiles, and alpha + beta * bytes")
    bandwidth_plot.set_ylabel("bus bandwidth, GB/s")
    larger = [*list(sizes)[1:], math.inf]
    apart = {size: name for (size, name), after in zip(sizes.items(), larger, strict=True) if after > 2.5 * size}
    for plot in axes[0]:
        plot.set_xscale("log", base=2)
        plot.set_yscale("log")
        plot.set_xticks(list(apart), list(apart.values()), rotation=45, ha="right", fontsize=8)
        plot.set_xlabel("size of the tensor")
        plot.grid(alpha=0.25)
    time_plot.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1 else f"{value:,.0f}")
    bandwidth_plot.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)
