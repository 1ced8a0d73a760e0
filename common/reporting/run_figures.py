"""The figures of a run, and the style of all figures: drawn without a display and written as PNG.

The figures of the benchmarks are in common/benchmarking/figures.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.errors import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from common.training.metrics import Record

MOST_NAMED_CLASSES = 45
LONG_NAME = 18  # letters that fit above an image of the grid
WIDTH, DPI = 9, 200  # inches; a README shows the 1800 pixels at 830, where letters of 8 points are 10 pixels high
COLORS = ("#1f6fb4", "#d9542b", "#3a9a5b", "#8a5fb0", "#b8912b", "#5f6b76", "#8fb8dc", "#7fb8a0")

STYLE: Any = {
    **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 8),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.alpha": 0.25,
}


def plot_curves(path: Path, records: Sequence[Record], title: str, unit: str = "images") -> None:
    """Loss, accuracy, learning rate and throughput over the run, from the records of ``metrics.jsonl``."""
    panels: dict[str, dict[str, tuple[str, str]]] = {
        "cross-entropy": {"train, all ranks": ("step", "loss"), "test": ("epoch", "test_loss")},
        "accuracy, %": {
            "train, while training": ("epoch", "accuracy"),
            "test, every sample once": ("epoch", "test_accuracy"),
        },
        "learning rate": {"": ("step", "learning_rate")},
        f"{unit}/s, all ranks": {"": ("step", "images_per_s")},
    }
    figure, axes = new_figure(2, 2, 5.6, title)
    for plot, (y_title, curves) in zip(axes.flat, panels.items(), strict=True):
        scale = 100 if "%" in y_title else 1
        for number, (label, (kind, name)) in enumerate(curves.items()):
            points = [
                (r["step"], scale * r[name])
                for r in records
                if r["kind"] == kind and isinstance(r.get(name), int | float)
            ]
            style = "o-" if kind == "epoch" else "-"
            plot.plot(*np.array(points).reshape(-1, 2).T, style, color=COLORS[number], label=label, markersize=4)
        plot.set(xlabel="optimizer step", ylabel=y_title)
        if "" not in curves:
            plot.legend(fontsize=8, frameon=False)
    for plot in (axes[0, 0], axes[1, 1]):
        plot.set_ylim(bottom=0)
    figure.savefig(path)


def plot_confusion(path: Path, confusion: npt.NDArray[np.int64], classes: Sequence[str], title: str) -> None:
    """The confusion matrix.

    :param confusion: int64 ``[classes, classes]``, counts; rows are the true classes, columns the predicted ones
    :param classes: their names
    """
    side = min(max(6.8, 2.5 + 0.3 * len(classes)), 16)
    figure, axes = new_figure(1, 1, side, title, max(WIDTH, side))
    plot, names = axes[0, 0], [printable(name) for name in classes]
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    plot.grid(visible=False)
    plot.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(classes) <= MOST_NAMED_CLASSES:
        for (row, column), count in np.ndenumerate(confusion):
            if count:
                color = "white" if shares[row, column] > 0.5 else "black"
                plot.text(column, row, str(count), ha="center", va="center", color=color, fontsize=8)
        recalls = [f"{name}  {100 * shares[i, i]:.1f} %" for i, name in enumerate(names)]
        plot.set_xticks(range(len(classes)), names, rotation=45, ha="right", parse_math=False)
        plot.set_yticks(range(len(classes)), recalls, parse_math=False)
    plot.set_xlabel("predicted")
    plot.set_ylabel("true class, and the share of it that was recognized")
    figure.savefig(path)


def plot_samples(
    path: Path,
    images: npt.NDArray[np.uint8],
    labels: Sequence[int],
    predictions: Sequence[int],
    classes: Sequence[str],
    title: str,
) -> None:
    """Images in a grid of eight columns, each with its prediction; wrong ones in red, with the true class.

    :param images: uint8 ``[n, channels, height, width]``, grey or RGB; of other numbers of channels, the first is drawn
    :param labels: true class of each image
    :param predictions: predicted class of each image
    :param classes: their names
    """
    columns, names = 8, [printable(name) for name in classes]
    rows = -(-len(images) // columns)
    figure, axes = new_figure(1, 1, WIDTH / columns * rows + 0.6, title)
    plot = axes[0, 0]  # one for all: axes of its own for each image would take a second
    plot.set_axis_off()
    for number, (image, label, prediction) in enumerate(zip(images, labels, predictions, strict=True)):
        row, column = divmod(number, columns)
        drawn = image if len(image) in (1, 3) else image[:1]
        height, width = (0.72 * side / max(drawn.shape[1:]) for side in drawn.shape[1:])
        place = (column + 0.5 - width / 2, column + 0.5 + width / 2, row + 1, row + 1 - height)
        plot.imshow(drawn.transpose(1, 2, 0).squeeze(), cmap="gray", extent=place)
        right = label == prediction
        text = names[prediction] if right else f"{names[prediction]}, not {names[label]}"
        if len(text) > LONG_NAME:
            text = text.replace(", ", ",\n")
        color = "black" if right else "#c0271a"
        plot.text(
            column + 0.5, row + 0.98 - height, text, color=color, ha="center", va="bottom", fontsize=8, parse_math=False
        )
    plot.set(xlim=(0, columns), ylim=(rows, 0))
    figure.savefig(path)


def plot_text(path: Path, texts: Sequence[str], predicted: Sequence[str], title: str) -> None:
    """Lines of text in four columns; below each line, the characters that were predicted in the place of others: in red after
    the equals sign, and else in grey, since the line before does not tell them.

    :param predicted: as long as ``texts``, line by line
    """
    columns = 4
    rows = -(-len(texts) // columns)
    figure, axes = new_figure(
        1,
        1,
        0.4 * rows + 0.8,
        f"{title}: lines of the test set, and wrong predictions below (grey: cannot be known)",
    )
    plot, style = axes[0, 0], {"family": "monospace", "fontsize": 9, "parse_math": False}
    plot.set_axis_off()
    plot.set_xlim(0, columns)
    plot.set_ylim(rows, -0.4)
    for number, (text, guesses) in enumerate(zip(texts, predicted, strict=True)):
        row, column = divmod(number, columns)
        wrong = "".join(" " if guess == given else guess for guess, given in zip(guesses, text, strict=True))
        plot.text(column, row, text, **style)
        known = text.find("=") + 1
        plot.text(column, row + 0.4, wrong[:known], color="0.6", **style)
        plot.text(column, row + 0.4, " " * known + wrong[known:], color="#c0271a", **style)
    figure.savefig(path)


def new_figure(
    rows: int, columns: int, height: float, title: str, width: float = WIDTH, **subplots: Any
) -> tuple[Figure, Any]:
    """Create a figure with the Agg backend. (pyplot would keep it alive in a global list, and might look for a display.)

    :param height: in inches, as the width
    :param subplots: settings of matplotlib's ``subplots``
    :returns: the figure, and its axes ``[rows, columns]``
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(printable(title), fontsize=10, parse_math=False)  # it may have a path: no $ begins a formula
    with rc_context(STYLE):
        return figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def label_ends(plot: Any, ends: Mapping[str, tuple[float, float, Any]]) -> None:
    """Write the name of each curve to the right of the axes, apart from the others, with a thin line from the curve's end.

    :param ends: for each name the end of its curve, x and y, and its color; the axes have their limits already
    """
    gap = 0.16 / (plot.get_figure().get_figheight() - 1)  # of a line of text, as a share of the height
    to_axes, y = plot.transData + plot.transAxes.inverted(), 1 + gap
    for name, (*end, color) in sorted(ends.items(), key=lambda item: -item[1][1]):
        place = to_axes.transform(end)
        y = min(y - gap, place[1])
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "relpos": (0, 0.5)}
        where = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
        plot.annotate(name, place, (1.03, y), arrowprops=line, color=color, fontsize=8, va="center", **where)
