"""``python -m ddp.bench sharding``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp.bench.sharding import SHARDED_VARIANTS
from tests.support.launch import run_forked

SMALL = ("--width", "64", "--layers", "2", "--length", "8", "--builds", "1", "--rounds", "2", "--turn", "0.01")


@pytest.mark.examples
def test_every_variant_is_measured(tmp_path: Path) -> None:
    (done,) = run_forked("ddp.bench", "sharding", *SMALL, "--output", str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on ")
    assert "a transformer of 0.1 M parameters, 1 x 2 rounds" in lines[0]
    assert [line[2:34].strip() for line in lines[2:-1]] == list(SHARDED_VARIANTS)
    assert lines[-1] == f"results in {tmp_path}: sharding.json, sharding.png"
    written = json.loads((tmp_path / "sharding.json").read_text())
    assert {name: len(seconds) for name, seconds in written["seconds"].items()} == dict.fromkeys(SHARDED_VARIANTS, 2)
    assert (tmp_path / "sharding.png").is_file()
