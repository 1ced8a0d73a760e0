"""``python -m ddp.bench memory``: what is counted is what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp.bench.memory import PARTS, formula
from ddp.bench.sharding import STAGES
from tests.support.launch import run_command

SMALL = ("--width", "64", "--layers", "2", "--length", "8")


@pytest.mark.examples
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_holds_and_sends_what_the_formulas_say(tmp_path: Path, ranks: int) -> None:
    """A rank holds and sends what the formulas say.

    Claim (ddp/sharded/README.md, 2, 6): the bench's own count is that of the formulas.
    """
    more = ("--ranks", str(ranks), "--output", str(tmp_path))
    done = run_command("ddp.bench", "memory", *SMALL, *more, timeout_s=280)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "memory.json").read_text())
    parameters = written["parameters"]
    assert [row["variant"] for row in written["ledger"]] == list(STAGES)
    for row in written["ledger"]:
        for part in PARTS:
            assert row["resident"][part] == pytest.approx(row["formula"][part], rel=0.03), (row["variant"], part)
        # A rank sends all but its own share of two or three times the parameters; at stage 3 the root is gathered once.
        stage = STAGES[row["variant"]]
        times = {None: (0.0, 0.0), 0: (0.0, 0.0), 1: (2, 2.01), 2: (2, 2.01), 3: (2.7, 3)}[stage]
        assert times[0] <= row["sent"] / parameters / 4 * ranks / (ranks - 1) <= times[1] + 0.02
    assert (tmp_path / "memory.png").is_file()
    assert done.stdout.splitlines()[-1] == f"results in {tmp_path}: memory.json, memory.png"


def test_the_papers_table() -> None:
    """The formulas give the bytes per parameter of the ZeRO paper's table."""
    assert sum(formula(0, 4).values()) == 16
    for ranks in (1, 2, 64):
        assert sum(formula(1, ranks).values()) == pytest.approx(8 + 8 / ranks)
        assert sum(formula(2, ranks).values()) == pytest.approx(4 + 12 / ranks)
        assert sum(formula(3, ranks).values()) == pytest.approx(16 / ranks)
