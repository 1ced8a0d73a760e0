"""``python -m ddp.bench costs``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ddp.bench.costs import (
    COPIES,
    DDPS,
    HOOKS,
    HOOKS_AND_COPIES,
    PARTS,
    SUMS,
    VARIANTS,
    WAITING,
    WHOLE,
    Config,
    costs,
    report,
)
from ddp.bench.turns import Comparison
from ddp.bench.variants import FLOOR
from tests.support.launch import run_command


def test_a_part_is_the_difference_of_two_variants_and_waiting_is_the_rest() -> None:
    processor = {name: [0.0, 0.0] for name in VARIANTS} | {FLOOR: [0.010, 0.020]}
    seconds = {name: [0.030, 0.040] for name in VARIANTS} | {FLOOR: [0.011, 0.021]}
    more = {HOOKS: 0.001, COPIES: 0.003, HOOKS_AND_COPIES: 0.004, SUMS: 0.007}
    for ddp in DDPS.values():
        for part, variant in ddp.items():
            processor[str(variant)] = [0.010 + more[part], 0.020 + more[part]]
    torch, *by_hand = costs(Comparison("mlp", seconds, processor, FLOOR)).values()
    for parts in by_hand:
        assert {part: values[0] for part, values in parts.items()} == pytest.approx(
            {HOOKS: 1, COPIES: 2, SUMS: 4, WAITING: 19 - 7, WHOLE: 19}
        )
    assert {part: values[1] for part, values in torch.items()} == pytest.approx(
        {HOOKS_AND_COPIES: 4, SUMS: 3, WAITING: 19 - 7, WHOLE: 19}
    )


def test_the_bars_are_as_high_as_the_whole_and_negative_parts_hang_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of processor times that are longer than the wall time, waiting is negative; medians of parts do not add up."""
    processor = {name: [0.08, 0.10, 0.09] for name in VARIANTS} | {FLOOR: [0.01, 0.01, 0.02]}
    seconds = {name: [0.08, 0.09, 0.10] for name in VARIANTS} | {FLOOR: [0.02, 0.01, 0.03]}
    seconds[str(DDPS["by hand, gloo"][SUMS])] = [0.05, 0.06, 0.07]
    drawn: dict[str, dict[str, list[float]]] = {}
    monkeypatch.setattr("ddp.bench.costs.plot_stacked", lambda path, panels, *_, **__: drawn.update(panels))
    report(Config(output=tmp_path), [Comparison("mlp", seconds, processor, FLOOR)])
    assert np.sum(list(drawn["mlp"].values()), axis=0) == pytest.approx([70, 40, 70])
    assert min(drawn["mlp"][WAITING]) < 0


@pytest.mark.examples
def test_every_part_is_measured(tmp_path: Path) -> None:
    """The bench measures every part of a step.

    Claim (ddp/README.md): the benches run and write their figures.
    """
    arguments = ("--models", "deep-mlp", "--builds", "1", "--rounds", "2", "--turn", "0.01", "--output", str(tmp_path))
    done = run_command("ddp.bench", "costs", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("deep-mlp: a step without synchronization takes ")
    assert [line[:34].strip() for line in lines[4:-1]] == [*PARTS, WHOLE]
    assert lines[-1] == f"results in {tmp_path}: costs.json, costs.png"
    (model,) = json.loads((tmp_path / "costs.json").read_text())["models"]
    assert list(model["parts"]) == list(DDPS)
    assert (tmp_path / "costs.png").is_file()
