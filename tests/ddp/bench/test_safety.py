"""``python -m ddp.bench safety``: what checkpoints, flags and the watchdog cost, in whole steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddp.bench.safety import AGAINST, PLAIN
from tests.support.launch import run_torchrun

LOOPS = (PLAIN, *AGAINST)


@pytest.mark.examples
def test_every_loop_is_measured(tmp_path: Path) -> None:
    """Every loop is measured.

    Claim (ddp/README.md): the longer benches run and write their figures.
    """
    sizes = ("--batch-size", "12", "--builds", "1", "--rounds", "2", "--steps", "2", "--device", "cpu")
    done = run_torchrun(2, "ddp.bench", "safety", *sizes, "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in LOOPS:
        assert re.search(rf"^ *{name}: .* ms per step$", done.stdout, re.MULTILINE)
    written = json.loads((tmp_path / "safety.json").read_text())
    assert {name: len(seconds) for name, seconds in written["seconds_per_step"].items()} == dict.fromkeys(LOOPS, 2)
    assert list(written["ratios"]) == [f"{name} / {other}" for name, other in AGAINST.items()]
    assert {path.name for path in tmp_path.iterdir()} == {"safety.json", "safety.png"}
