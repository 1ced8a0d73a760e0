"""The figure of a batch: a grid of images, with a name under each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from common.errors import printable
from common.reporting.run_figures import new_figure


def plot_grid(path: Path, grid: npt.NDArray[Any], names: Sequence[str], columns: int, title: str) -> None:
    """A grid of images as ``torchvision.utils.make_grid`` makes it, with a name under each.

    :param grid: ``[height, width, 3]``, uint8 or float in [0, 1]
    :param names: one per image, row by row
    :param columns: number of columns of the grid
    """
    rows = -(-len(names) // columns)
    figure, axes = new_figure(1, 1, (1.5 * columns, 1.65 * rows + 0.5), title)
    plot = axes[0, 0]
    plot.imshow(grid)
    plot.set_axis_off()
    height, width = grid.shape[0] / rows, grid.shape[1] / columns
    for i, name in enumerate(names):
        position = (i % columns + 0.5) * width, (i // columns + 1) * height - 4
        box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1}
        plot.text(*position, printable(name), ha="center", va="bottom", fontsize=7, bbox=box, parse_math=False)
    figure.savefig(path, dpi=110)
