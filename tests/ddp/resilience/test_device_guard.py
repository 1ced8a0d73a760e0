"""ddp/resilience/device_guard.py: real jobs end with the bits of the guard that reads in every step, whatever goes wrong.

On the CPU, where the device guard works too; so two gloo ranks prove what happens on GPUs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from common.errors import UsageError
from common.signals.stop_request import REQUEUE
from common.training.precision import set_arithmetic
from ddp import train
from ddp.checkpoint import storage
from ddp.config import TrainConfig
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from ddp.resilience.device_guard import DeviceGuard
from ddp.resilience.guard import ResilientGuard
from tests.ddp.jobs import assert_identical, final_state, small, tensors_of, without_figures
from tests.ddp.resilience.test_nonfinite import MICRO_STEPS, NAN_IMAGES, poisoned
from tests.support.harm.left import newest_step
from tests.support.launch import run_ranks

# Two epochs of five steps. Metrics are recorded after steps 4, 5, 8 and 10.
SETTINGS: dict[str, Any] = {
    "train_samples": 120, "test_samples": 20, "batch_size": 24, "epochs": 2, "grad_accumulation_steps": MICRO_STEPS,
    "dropout": 0.25, "log_every": 4, "checkpoint_every": "3", "keep_last": 100,
}  # fmt: skip
CULPRIT, SKIPPED = 1, [2, 5, 6, 7]
Guard = type[ResilientGuard]
Fault = Callable[[Job, Any], None]  # called in the place of ddp.train's train_step, which it calls


def run_job(config: TrainConfig, guard: Guard, fault: Fault) -> tuple[int, str]:
    """All of ``ddp.train`` but its figures, with this guard; its exit status, and the user error that ended it."""
    with without_figures(), process_group(threads=1) as env:
        set_arithmetic(env.device, config.tf32, config.deterministic, config.cudnn_benchmark)
        with mock.patch.object(train, "build_guard", guard), mock.patch.object(train, "train_step", fault):
            try:
                train.train(config, env)
            except SystemExit as end:
                return int(end.code or 0), ""
            except UsageError as error:
                return 2, str(error)
        return 0, ""


def no_fault(job: Job, batches: Any) -> None:
    TRAIN_STEP(job, batches)


def nans(job: Job, batches: Any) -> None:
    """Not finite on one rank: a step that is read one later, the last of an epoch, one to be saved, and another."""
    if job.step + 1 in SKIPPED:
        poisoned(job, NAN_IMAGES, batches)
    else:
        TRAIN_STEP(job, batches)


def nans_on_rank_0(job: Job, batches: Any) -> None:
    with mock.patch("tests.ddp.resilience.test_nonfinite.CULPRIT", 0):
        nans(job, batches)


def stop(job: Job, batches: Any) -> None:
    """One rank is told to stop."""
    if job.step + 1 == 1 and job.env.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # until the thread that takes signals has heard of it
    TRAIN_STEP(job, batches)


def error(job: Job, batches: Any) -> None:
    """One rank finds a damaged file."""
    if job.step + 1 == 3 and job.env.rank == CULPRIT:
        job.user_error = UsageError("a file is damaged")
    assert job.step + 1 <= 4, "went on"
    TRAIN_STEP(job, batches)


TRAIN_STEP = train.train_step


def saved(run_dir: Path) -> dict[str, Any]:
    """All that the checkpoints hold, but times."""
    found: dict[str, Any] = {}
    for path in sorted((run_dir / storage.FOLDER).iterdir()):
        manifest = storage.verify(path)
        progress = dict(manifest.progress)
        progress["windows"] = [(window["samples"], window["loss"]) for window in progress["windows"]]
        found[path.name] = repr(progress)
        for rank, own in enumerate(storage.read(path, "ranks")):
            found[f"{path.name}/window{rank}"] = torch.tensor(own["window"][:3])
        found |= {f"{path.name}/{name}": value for name, value in tensors_of(path).items()}
    return found


def assert_same_end(run_dir: Path, other: Path) -> list[dict[str, Any]]:
    """Two runs end with the same bits and records; returns the records."""
    (tensors, records), (expected_tensors, expected_records) = final_state(run_dir), final_state(other)
    assert_identical(tensors, expected_tensors)
    assert records == expected_records
    return records


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 1.0},
        pytest.param(
            {"precision": "fp16", "optimizer": "adamw", "strategy": "handwritten"}, marks=pytest.mark.slow
        ),  # fp16's steps: test_nonfinite.py
        pytest.param({"precision": "bf16", "strategy": "zero3"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp2"}, marks=pytest.mark.slow),  # whose SGD is not fused
    ],
)
def test_a_job_is_that_of_the_other_guard_and_so_is_all_that_it_saves(tmp_path: Path, settings: dict[str, Any]) -> None:
    """With the device's guard, a job and its checkpoints have the bits of one with the host's guard.

    Claim (ddp/resilience/README.md): where the device decides and the host reads a step later, a job skips, stops, saves,
    resumes and ends with the same bits.
    """
    device, host = tmp_path / "device", tmp_path / "host"
    for folder, guard in ((device, DeviceGuard), (host, ResilientGuard)):
        assert run_ranks(run_job, 2, small(**SETTINGS, **settings, run_dir=folder), guard, nans) == [(0, "")] * 2
    records = assert_same_end(device, host)
    assert [record["step"] for record in records if record["kind"] == "skipped"] == SKIPPED
    assert_identical(saved(device), saved(host))
    assert [path.name[-1] for path in sorted((device / storage.FOLDER).iterdir())] == ["3", "5", "9", "0"]


def test_all_ranks_stop_after_the_same_step_and_go_on_to_the_right_bits(tmp_path: Path) -> None:
    """All ranks stop after the same step and go on to the right bits.

    Claim (ddp/resilience/README.md): where the device decides and the host reads a step later, a job skips, stops, saves,
    resumes and ends with the same bits.
    """
    run_ranks(run_job, 2, small(**SETTINGS, run_dir=tmp_path / "whole"), ResilientGuard, no_fault)
    settings = SETTINGS | {"run_dir": tmp_path / "stopped"}
    assert run_ranks(run_job, 2, small(**settings), DeviceGuard, stop) == [(REQUEUE, "")] * 2
    assert newest_step(tmp_path / "stopped") == 2  # it was asked in step 1, whose flags are read in step 2
    assert run_ranks(run_job, 2, small(**settings, resume=True), DeviceGuard, no_fault) == [(0, "")] * 2
    assert_same_end(tmp_path / "stopped", tmp_path / "whole")


def test_a_user_error_of_one_rank_ends_all_and_nothing_is_saved_after_it(tmp_path: Path) -> None:
    config = small(**SETTINGS | {"checkpoint_every": "1", "log_every": 100}, run_dir=tmp_path / "run")
    said = f"[rank {CULPRIT}] a file is damaged"
    assert run_ranks(run_job, 2, config, DeviceGuard, error) == [(2, said)] * 2
    assert newest_step(tmp_path / "run") == 2


def test_a_checkpoint_that_is_due_by_the_clock_holds_the_state_of_its_step(tmp_path: Path) -> None:
    config = {**SETTINGS, "epochs": 1, "keep_last": 100}
    run_ranks(run_job, 2, small(**config | {"checkpoint_every": "1"}, run_dir=tmp_path / "each"), ResilientGuard, nans)
    often = {"checkpoint_every": "0.00001min"}
    run_ranks(run_job, 2, small(**config | often, run_dir=tmp_path / "clock"), DeviceGuard, nans)
    each, found = saved(tmp_path / "each"), saved(tmp_path / "clock")
    assert sorted({name.partition("/")[0][-1] for name in found}) == ["4", "5"]  # not again in the step after it
    assert_identical(found, {name: each[name] for name in found})


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_both_guards_come_to_the_same_bits(tmp_path: Path, precision: str) -> None:
    for name, guard in (("device", DeviceGuard), ("host", ResilientGuard)):
        config = small(**SETTINGS, precision=precision, deterministic=True, run_dir=tmp_path / name)
        assert run_ranks(run_job, 1, config, guard, nans_on_rank_0, fresh=True) == [(0, "")]
    assert_same_end(tmp_path / "device", tmp_path / "host")
    assert_identical(saved(tmp_path / "device"), saved(tmp_path / "host"))
