"""common/reporting/run_figures.py and common/benchmarking/figures.py: every figure is a PNG of a sensible size that is not blank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from common.benchmarking.figures import plot_rounds, plot_stacked
from common.reporting.run_figures import plot_confusion, plot_curves, plot_samples

Pixels = npt.NDArray[np.int64]

STEPS: list[dict[str, Any]] = [
    {"kind": "step", "step": s, "loss": 2 / s, "learning_rate": 0.1, "images_per_s": 900.0 + s} for s in (10, 20, 30)
]
EPOCHS: list[dict[str, Any]] = [
    {"kind": "epoch", "step": s, "test_loss": 3 / s, "train_accuracy": 0.7, "test_accuracy": 0.6} for s in (15, 30)
]


def pixels_of(path: Path) -> Pixels:
    """A figure's RGB values, int64 ``[height, width, 3]``. Checks that it is a PNG, neither tiny nor huge nor blank."""
    with Image.open(path) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"), np.int64)
    height, width, _ = pixels.shape
    assert 100 <= height <= 2000
    assert 400 <= width <= 2000
    assert len(np.unique(pixels @ [1 << 16, 1 << 8, 1])) > 20
    assert (pixels.min(axis=2) < 100).sum() > 200  # axes and text
    return pixels


@pytest.mark.parametrize(
    "records", [STEPS + EPOCHS, STEPS, STEPS[:1], EPOCHS, []], ids=["all", "steps", "one", "epochs", "none"]
)
def test_curves_are_drawn_from_whatever_records_there_are(records: list[dict[str, Any]], tmp_path: Path) -> None:
    plot_curves(tmp_path / "curves.png", records, "A run")
    pixels_of(tmp_path / "curves.png")


def test_a_loss_that_is_not_a_number_leaves_the_curve_as_it_was(tmp_path: Path) -> None:
    plot_curves(tmp_path / "before.png", STEPS, "A run")
    plot_curves(tmp_path / "after.png", [*STEPS, {"kind": "step", "step": 40, "loss": "nan"}], "A run")
    np.testing.assert_array_equal(pixels_of(tmp_path / "after.png"), pixels_of(tmp_path / "before.png"))


@pytest.mark.parametrize("variants", [1, 3, 8])
@pytest.mark.parametrize(("panels", "scale"), [(1, "from zero"), (2, "near"), (4, "log")])
def test_ratios_are_drawn_for_any_number_of_variants(variants: int, panels: int, scale: str, tmp_path: Path) -> None:
    ratios = {f"variant {i}": [1.0, 1.01 + i / 100, 0.99] for i in range(variants)}
    titled = {f"panel {number}": ratios for number in range(panels)}
    plot_rounds(tmp_path / "ratios.png", titled, title="Overhead", x_title="ratio", scale=scale)
    pixels_of(tmp_path / "ratios.png")


def test_no_figure_is_kept_or_shown_by_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it would now fail
    plot_curves(tmp_path / "curves.png", STEPS, "A run")


def test_names_that_are_no_text_or_look_like_formulas_are_drawn(tmp_path: Path) -> None:
    """A class that never occurs is drawn too."""
    names = ("caf\udce9", "two\nlines", r"$\frac$")
    plot_confusion(
        tmp_path / "confusion.png", np.array([[5, 1, 0], [0, 0, 0], [1, 1, 9000]]), names, r"data in /tmp/$a$\udce9"
    )
    images = np.random.default_rng(0).integers(0, 256, (3, 3, 12, 12), np.uint8)
    plot_samples(tmp_path / "samples.png", images, [0, 1, 2], [0, 1, 1], names, "a run")
    for name in ("confusion.png", "samples.png"):
        pixels_of(tmp_path / name)


def test_parts_of_a_whole_are_drawn(tmp_path: Path) -> None:
    """Negative parts, parts that only the first panel has, and a line to compare with."""
    panels = {"one": {"a": [1.0, 2.0], "b": [0.5, -0.3]}, "other": {"a": [1.0, 1.0]}}
    plot_stacked(tmp_path / "parts.png", panels, ("x", "y"), x_title="ms", title="Parts", line=1.0)
    pixels_of(tmp_path / "parts.png")
