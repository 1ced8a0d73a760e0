"""The parts of a DDP that ``python -m ddp.bench engines`` tells apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddp.bench.comparison import Comparison
from ddp.bench.costs import (
    COPIES,
    DDPS,
    HOOKS,
    HOOKS_AND_COPIES,
    PARTIAL,
    SUMS,
    WAITING,
    WHOLE,
    costs,
    report_costs,
)
from ddp.bench.variants import DDP_VARIANTS, FLOOR

VARIANTS = (*DDP_VARIANTS, *PARTIAL)


def test_a_part_is_the_difference_of_two_variants_and_waiting_is_the_rest() -> None:
    processor = {name: [0.0, 0.0] for name in VARIANTS} | {FLOOR: [0.010, 0.020]}
    seconds = {name: [0.030, 0.040] for name in VARIANTS} | {FLOOR: [0.011, 0.021]}
    more = {HOOKS: 0.001, COPIES: 0.003, HOOKS_AND_COPIES: 0.004, SUMS: 0.007}
    for ddp in DDPS.values():
        for part, variant in ddp.items():
            processor[variant] = [0.010 + more[part], 0.020 + more[part]]
    *of_torch, by_hand, in_shared_memory = costs(Comparison("mlp", seconds, processor, FLOOR)).values()
    for parts in (by_hand, in_shared_memory):
        assert {part: values[0] for part, values in parts.items()} == pytest.approx(
            {HOOKS: 1, COPIES: 2, SUMS: 4, WAITING: 19 - 7, WHOLE: 19}
        )
    for parts in of_torch:
        assert {part: values[1] for part, values in parts.items()} == pytest.approx(
            {HOOKS_AND_COPIES: 4, SUMS: 3, WAITING: 19 - 7, WHOLE: 19}
        )


def test_the_bars_are_as_high_as_the_whole_and_negative_parts_hang_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If processor times are longer than the wall time, waiting is negative. Medians of parts do not add up."""
    processor = {name: [0.08, 0.10, 0.09] for name in VARIANTS} | {FLOOR: [0.01, 0.01, 0.02]}
    seconds = {name: [0.08, 0.09, 0.10] for name in VARIANTS} | {FLOOR: [0.02, 0.01, 0.03]}
    seconds[DDPS["by hand, gloo"][SUMS]] = [0.05, 0.06, 0.07]
    drawn: dict[str, dict[str, list[float]]] = {}
    monkeypatch.setattr("ddp.bench.costs.plot_stacked", lambda path, panels, *_, **__: drawn.update(panels))
    report_costs(tmp_path / "costs.png", [Comparison("mlp", seconds, processor, FLOOR)], "")
    assert np.sum(list(drawn["mlp"].values()), axis=0) == pytest.approx([70, 70, 40, 70])
    assert min(drawn["mlp"][WAITING]) < 0
