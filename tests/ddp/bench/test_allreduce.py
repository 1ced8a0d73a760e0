"""``python -m ddp.bench allreduce``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ddp.bench.allreduce import Config, report
from tests.support.fake_gpu import pretend_gpus
from tests.support.launch import run_command, run_forked

ALGORITHMS = ["backend", "naive", "ring", "halving-doubling", "tree", "shared-memory"]


@pytest.mark.examples
def test_every_algorithm_is_measured(tmp_path: Path) -> None:
    (done,) = run_forked(
        "ddp.bench", "allreduce", "--ranks", "2", "--sizes", "4096,4", "--rounds", "2", "--output", str(tmp_path),
        timeout_s=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and line[2:3].strip()]
    assert rows == 3 * ALGORITHMS  # of 4 B, of 4 KiB, and the fits
    assert "memory, all ranks at once" in done.stdout

    written = json.loads((tmp_path / "allreduce.json").read_text())
    assert [one["name"] for one in written["algorithms"]] == ALGORITHMS
    for one in written["algorithms"]:
        assert {size: len(values) for size, values in one["seconds"].items()} == {"4": 2, "4096": 2}
        assert one["fit"]["alpha"] + one["fit"]["beta"] > 0
        median = math.fsum(one["seconds"]["4096"]) / 2
        assert one["bus_bandwidth"]["4096"] == pytest.approx(4096 / median)  # of two ranks: 2 (n - 1) / n = 1
    assert written["memory_bytes_per_s"] > 1e6
    assert (tmp_path / "allreduce.png").is_file()


def test_on_gpus_nccl_is_measured_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_gpus(monkeypatch, 4)
    config = Config(sizes=(4, 4096), rounds=2, output=tmp_path)
    assert (config.ranks, config.device, config.algorithms) == (4, "cuda", ("backend",))
    assert list(Config(device="cpu").algorithms) == ALGORITHMS
    text = report(config, ({"backend": {4: [1e-5, 2e-5], 4096: [2e-5, 3e-5]}}, 0.0))
    assert text.startswith("all-reduce, 4 ranks on 4 GPUs, nccl, float32; 2 rounds")
    assert "memory" not in text
    assert json.loads((tmp_path / "allreduce.json").read_text())["memory_bytes_per_s"] is None
    assert (tmp_path / "allreduce.png").is_file()


@pytest.mark.gpu
def test_two_ranks_that_share_a_gpu(tmp_path: Path) -> None:
    """Over gloo: NCCL takes no more than one rank of a GPU."""
    ranks = ("--device", "cuda", "--ranks", str(torch.cuda.device_count() + 1))
    sizes = ("--sizes", "4,4096", "--rounds", "2", "--output", str(tmp_path))
    done = run_command("ddp.bench", "allreduce", *ranks, *sizes, timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert " GPU" in done.stdout.splitlines()[0]
    written = json.loads((tmp_path / "allreduce.json").read_text())
    assert all(value > 0 for values in written["algorithms"][0]["seconds"].values() for value in values)
