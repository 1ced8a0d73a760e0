"""Two ranks that share a GPU, over gloo: what they do on CPUs they do there, though NCCL could not run.

The rank functions are those of the CPU's tests. A GPU's kernels need not repeat their own bits, so results are compared to rounding.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp.config import TrainConfig
from tests.ddp.jobs import assert_close, final_state, run_job, small, train_epochs
from tests.ddp.test_train import norm_that_clipping_sees
from tests.support.harm.kill import forked_training
from tests.support.launch import run_forked, run_ranks

pytestmark = pytest.mark.gpu

GPU: dict[str, Any] = {"device": "cuda", "backend": "gloo"}
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps ten bits of each factor, so that a sum in another order differs visibly."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")


def on_gpu(**settings: Any) -> TrainConfig:
    """A small job of twenty steps or fewer; at a high learning rate, rounding would grow with each."""
    return small(**{"lr": 0.002, "train_samples": 1440, **GPU, **settings})


def run(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """On fresh ranks: those of the pool have no GPU."""
    return run_ranks(function, world_size, *arguments, fresh=True)


def test_two_ranks_train_as_one_and_as_the_cpu() -> None:
    settings = {"sync_batchnorm": True}
    cpu, one, (two, _) = (
        run(train_epochs, 1, small(lr=0.002, train_samples=1440, device="cpu", **settings))[0],
        run(train_epochs, 1, on_gpu(**settings))[0],
        run(train_epochs, 2, on_gpu(**settings)),
    )
    for outcome in (one, two):
        assert_close(outcome.parameters, cpu.parameters, 10 * TOLERANCE)
        assert outcome.losses == pytest.approx(cpu.losses, rel=TOLERANCE)


@pytest.mark.parametrize("strategy", ["naive", "handwritten"])
def test_the_hand_written_ddps_train_as_torch_s(strategy: str) -> None:
    """On a GPU, the hand-written DDPs train as torch's.

    Claim (ddp/README.md): on a GPU that two ranks share, both DDPs train, accumulate, clip, save and resume.
    """
    settings = {"dropout": 0.25, "grad_accumulation_steps": 2, "clip_norm": 1.0}
    expected, outcome = (run(train_epochs, 2, on_gpu(**settings, strategy=name))[0] for name in ("torch", strategy))
    assert_close(outcome.parameters, expected.parameters, TOLERANCE)
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)


def test_micro_steps_equal_one_big_batch() -> None:
    """Four micro-steps end with the parameters of one batch of the same samples.

    Claim (ddp/README.md): on a GPU that two ranks share, both DDPs train, accumulate, clip, save and resume.
    """
    whole, divided = (run(train_epochs, 2, on_gpu(model="mlp", grad_accumulation_steps=k))[0] for k in (1, 4))
    assert_close(divided.parameters, whole.parameters, TOLERANCE)
    assert divided.losses == pytest.approx(whole.losses, rel=TOLERANCE)


def test_clipping_sees_unscaled_gradients() -> None:
    """Clipping sees unscaled gradients.

    Claim (ddp/README.md): on a GPU that two ranks share, both DDPs train, accumulate, clip, save and resume.
    """
    (norm, clipped), other = run(norm_that_clipping_sees, 2, on_gpu(precision="fp32", clip_norm=0.01))
    assert other == (norm, clipped)  # no collective is needed: the ranks hold the same gradients
    assert clipped == pytest.approx(0.01, rel=1e-3)
    assert run(norm_that_clipping_sees, 2, on_gpu(precision="fp16", clip_norm=0.01))[0][0] == pytest.approx(
        norm, rel=0.02
    )


@pytest.mark.parametrize("settings", [{"async_checkpoint": True}, {"strategy": "handwritten", "precision": "fp16"}])
def test_a_run_is_saved_resumed_and_evaluated_elsewhere(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A run on a GPU is saved, resumed there, and evaluated on the CPU.

    On the GPU after the sixth of eight steps; on the CPU after the last.

    Claim (ddp/README.md): on a GPU that two ranks share, both DDPs train, accumulate, clip, save and resume.
    """
    config = {"epochs": 2, "train_samples": 576, "log_every": 3, "checkpoint_every": "1", "keep_last": 100, **settings}
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(run_job, 2, on_gpu(**config, run_dir=whole))
    shutil.copytree(whole, part)
    for later in (part / "checkpoints").iterdir():
        if int(later.name[-8:]) > 6:
            shutil.rmtree(later)
    run(run_job, 2, on_gpu(**config, run_dir=part, resume=True))
    (expected, metrics), (tensors, resumed) = final_state(whole), final_state(part)
    for name, value in expected.items():
        assert torch.allclose(tensors[name].double(), value.double(), rtol=0.01, atol=10 * TOLERANCE), name
    assert [record["step"] for record in resumed] == [record["step"] for record in metrics]
    (done,) = run_forked("ddp.evaluate", "--run-dir", part, "--test-samples", "301", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(r"^accuracy (\S+) %", done.stdout, re.MULTILINE)
    expected_accuracy = json.loads((part / "result.json").read_text())["test"]["accuracy"]
    assert float(accuracy) == pytest.approx(100 * expected_accuracy, abs=0.5)


@pytest.mark.faults
def test_the_watchdog_names_a_rank_that_hangs(tmp_path: Path) -> None:
    flags = ("--device", "cuda", "--backend", "gloo", "--model", "mlp", "--epochs", "1000", "--timeout", "5")
    with forked_training(tmp_path / "run", *flags) as job:
        job.wait_for_step(10)
        job.send(1, signal.SIGSTOP)
        job.forks[0].join(60.0)
        job.send(1, signal.SIGCONT)
        assert job.exit_statuses(30.0) == [1, 1]
        assert re.search(r"ERROR .*\] rank 1 \(host \S+, pid \d+\) did not arrive in \w+ of step \d+", job.log(0))
