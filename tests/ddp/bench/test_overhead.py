"""``torchrun -m ddp.bench overhead`` and ``safety``: loops around the trainer's step, on ranks that torchrun starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp.bench.overhead import BARE, BARE_DDP, TRAINER
from ddp.bench.safety import AGAINST, PLAIN
from tests.support.launch import run_torchrun

SMALL = ("--device", "cpu", "--batch-size", "48", "--builds", "1", "--rounds", "2", "--steps", "2")


@pytest.mark.examples
@pytest.mark.parametrize(
    ("name", "loops"),
    [("overhead", [BARE, BARE_DDP, TRAINER]), ("safety", [PLAIN, *AGAINST])],
    ids=["overhead", "safety"],
)
def test_every_loop_is_measured_and_no_checkpoint_is_left(name: str, loops: list[str], tmp_path: Path) -> None:
    done = run_torchrun(2, "ddp.bench", name, *SMALL, "--output", str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert {loop: len(times) for loop, times in written["seconds_per_step"].items()} == dict.fromkeys(loops, 2)
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.json", f"{name}.png"}
