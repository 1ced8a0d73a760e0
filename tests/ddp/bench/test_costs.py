"""``python -m ddp.bench costs``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp.bench import __main__ as bench
from ddp.bench.costs import COPIES, DDPS, HOOKS, HOOKS_AND_COPIES, NOTHING, PARTS, SUMS, VARIANTS, WAITING, costs
from tests.support.launch import run_command
from tests.support.user_errors import UserError


def test_a_part_is_the_difference_of_two_variants_and_waiting_is_the_rest() -> None:
    torch, by_hand, shared = DDPS
    processor = {NOTHING: [0.010, 0.020], **{name: [0.0, 0.0] for name in VARIANTS if name != NOTHING}}
    seconds = {name: [0.030, 0.040] for name in VARIANTS} | {NOTHING: [0.011, 0.021]}
    for part, more in {HOOKS: 0.001, COPIES: 0.003, SUMS: 0.007}.items():
        for ddp in (by_hand, shared):
            processor[str(ddp.parts[part])] = [0.010 + more, 0.020 + more]
    for part, more in {HOOKS_AND_COPIES: 0.004, SUMS: 0.009}.items():
        processor[str(torch.parts[part])] = [0.010 + more, 0.020 + more]
    found = costs("mlp", seconds, processor)
    assert found.step.median == pytest.approx(16)
    for ddp in (by_hand, shared):
        parts = {part: spread.median for part, spread in found.parts[ddp.name].items()}
        assert parts == pytest.approx({HOOKS: 1, COPIES: 2, SUMS: 4, WAITING: 19 - 7})
        assert sum(parts.values()) == pytest.approx(found.whole[ddp.name].median)
    parts = {part: spread.median for part, spread in found.parts[torch.name].items()}
    assert parts == pytest.approx({HOOKS_AND_COPIES: 4, SUMS: 5, WAITING: 19 - 9})


@pytest.mark.examples
def test_every_part_is_measured(tmp_path: Path) -> None:
    arguments = ("--models", "deep-mlp", "--builds", "1", "--rounds", "2", "--turn", "0.01", "--output", str(tmp_path))
    done = run_command("ddp.bench", "costs", *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[2].startswith("deep-mlp: a step without synchronization takes ")
    assert [line[:20].strip() for line in lines[4:-1]] == [*PARTS, "the whole"]
    assert lines[-1] == f"results in {tmp_path}: costs.json, costs.png"
    (model,) = json.loads((tmp_path / "costs.json").read_text())["models"]
    assert list(model["parts"]) == [ddp.name for ddp in DDPS]
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_is_one_line(user_error: UserError) -> None:
    assert "invalid choice: 'transformer'" in user_error(bench.main, "costs", "--models", "transformer")
