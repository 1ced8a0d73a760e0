"""``python -m ddp.bench memory``: what is counted is what the formulas say, and what fits is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddp.bench.__main__ import main
from ddp.bench.memory.ledger import PARTS, formula
from ddp.bench.sharding import STAGES
from tests.support.launch import run_command
from tests.support.user_errors import UserError

SMALL = ("--width", "64", "--layers", "2", "--length", "8")


@pytest.mark.examples
@pytest.mark.parametrize(("precision", "ranks"), [("fp32", 2), ("bf16", 3)])
def test_a_rank_holds_and_sends_what_the_formulas_say(tmp_path: Path, precision: str, ranks: int) -> None:
    """A rank holds and sends what the formulas say.

    Claim (ddp/sharded/README.md, 2, 6): the bench's own count is that of the formulas, in fp32 and bf16.
    """
    more = ("--ranks", str(ranks), "--precision", precision, "--output", str(tmp_path))
    done = run_command("ddp.bench", "memory", *SMALL, *more, timeout_s=280)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "memory.json").read_text())
    parameters = written["parameters"]
    assert [row["variant"] for row in written["ledger"]] == list(STAGES)
    for row in written["ledger"]:
        for part in PARTS:
            assert row["resident"][part] == pytest.approx(row["formula"][part], rel=0.03), (row["variant"], part)
        # A rank sends all but its own share of two or three times the parameters; at stage 3 the root is gathered once.
        width, stage = 2 if precision == "bf16" else 4, STAGES[row["variant"]]
        times = {None: (0.0, 0.0), 0: (0.0, 0.0), 1: (2, 2.01), 2: (2, 2.01), 3: (2.7, 3)}[stage]
        assert times[0] <= row["sent"] / parameters / width * ranks / (ranks - 1) <= times[1] + 0.02
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.splitlines()[-1] == f"results in {tmp_path}: memory.json, memory.png"


@pytest.mark.examples
def test_the_largest_model_within_a_limit(tmp_path: Path) -> None:
    """The bench finds and trains the largest model within a memory limit.

    Claim (ddp/sharded/README.md, 7): the largest model within a limit is found and trained.
    """
    more = ("--width", "128", "--ranks", "4", "--limit", "24MiB", "--output", str(tmp_path))
    done = run_command("ddp.bench", "memory", *more, timeout_s=280)
    assert done.returncode == 0, done.stderr
    largest = json.loads((tmp_path / "largest.json").read_text())["largest"]
    assert list(largest) == list(STAGES)
    for one in largest.values():
        assert one["peak"] <= 24 * 2**20
    assert largest["ZeRO-3"]["parameters"] > 1.5 * largest["replicas"]["parameters"]
    assert (tmp_path / "largest.png").read_bytes().startswith(b"\x89PNG")


def test_the_papers_table() -> None:
    """The formulas give the bytes per parameter of the ZeRO paper's table."""
    assert sum(formula(0, 4, "fp32").values()) == 16
    for ranks in (1, 2, 64):
        assert sum(formula(1, ranks, "fp32").values()) == pytest.approx(8 + 8 / ranks)
        assert sum(formula(2, ranks, "fp32").values()) == pytest.approx(4 + 12 / ranks)
        assert sum(formula(3, ranks, "fp32").values()) == pytest.approx(16 / ranks)
        assert sum(formula(1, ranks, "bf16").values()) == pytest.approx(4 + 16 / ranks)
        assert sum(formula(2, ranks, "bf16").values()) == pytest.approx(2 + 16 / ranks)


@pytest.mark.parametrize("limit", ["1", "0MiB", "12MB", "much"])
def test_a_limit_that_is_no_size(user_error: UserError, limit: str) -> None:
    """A limit that is no size is refused with an example."""
    assert (
        user_error(main, "memory", "--limit", limit) == f"error: --limit {limit} is no size: use, say, 256MiB or 1GiB"
    )


def test_a_width_that_heads_do_not_divide(user_error: UserError) -> None:
    """A width that is no multiple of a head is refused with the nearest."""
    assert "--width 200 is no multiple of 64, the width of a head: use 192 or 256" in user_error(
        main, "memory", "--width", "200"
    )


@pytest.mark.examples
def test_a_limit_that_is_too_small(tmp_path: Path) -> None:
    """A limit below the smallest model is refused with what it needs."""
    done = run_command("ddp.bench", "memory", *SMALL, "--ranks", "2", "--limit", "0.01MiB", "--output", str(tmp_path))
    assert done.returncode == 2
    expected = r"error: --limit 0\.01MiB is too little for the smallest model, of one block: replicas needs \d+ MiB\. Give more, .*"
    assert re.fullmatch(expected, done.stderr.splitlines()[-1])
