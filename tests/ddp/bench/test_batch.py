"""``python -m ddp.bench batch``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from common.training.recipes import load_dataset
from ddp.bench.batch import FIRST, Config, TrainingWorker
from ddp.rendezvous.worker_group import WorkerGroup
from tests.support.launch import run_command

SMALL = ("--dataset", "glyphs", "--train-samples", "720", "--epochs", "1")


def test_a_run_that_diverges_ends_early() -> None:
    """W times the batch takes a step for W batches. A run whose loss is nan ends early, and is tested."""
    config = Config(dataset="glyphs", train_samples=720, epochs=1)
    twice, once = config.run(2, "W times the rate"), config.run(1, FIRST)
    with WorkerGroup(1, TrainingWorker, load_dataset(once)) as group:
        (one,), (other,) = (group.call("run", settings) for settings in (twice, replace(once, lr=1e30)))
    assert (one["steps"], other["steps"] < 20) == (10, True)
    assert other["error"] > 0.5


@pytest.mark.examples
def test_each_rule_has_its_runs(tmp_path: Path) -> None:
    """Each rule has a row for each size, with a run for each seed. Where W is 1, all rules are the same."""
    more = ("--ranks", "1,2", "--seeds", "3", "--output", str(tmp_path))
    done = run_command("ddp.bench", "batch", *SMALL, *more, timeout_s=280)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "batch.json").read_text())["rows"]
    assert [(row["ranks"], row["lr"], len(row["runs"])) for row in rows] == [
        *((1, 0.025, 1), (2, 0.025, 1), (2, 0.05, 1), (2, 0.05, 1))
    ]
    assert (tmp_path / "batch.png").is_file()
