"""Jobs that the tests of ``ddp`` run on each rank: small real jobs on the glyphs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

from common.data.datasets import Batch
from common.distributed.dist_env import DistEnv
from common.reporting import report
from common.training.device_meter import DeviceTotals
from common.training.evaluation import evaluate
from common.training.metrics import TIMES, read_metrics
from ddp.checkpoint import load, storage
from ddp.checkpoint.shards import WEIGHT, open_tensors, shard_keys
from ddp.checkpoint.storage import RunCheckpoint
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from ddp.train import build_job, train, train_epoch, train_step

Arrays = dict[str, npt.NDArray[Any]]

# 20 steps per epoch of 144 samples, which divide over 1, 2, 3 and 4 ranks and over as many micro-steps.
SMALL: dict[str, Any] = {"train_samples": 2880, "test_samples": 301, "epochs": 1, "lr": 0.05, "dropout": 0.0}


@dataclasses.dataclass
class Outcome:
    """The state of a rank after its epochs."""

    parameters: Arrays
    losses: list[float]
    confusion: npt.NDArray[np.int64]


def small(**settings: Any) -> TrainConfig:
    """:data:`SMALL` with other settings."""
    return TrainConfig(**(SMALL | settings))


def parameters_of(job: Job) -> Arrays:
    """A copy of the plain model's parameters and buffers."""
    return {name: value.detach().cpu().numpy().copy() for name, value in job.network.state_dict().items()}


def group_of(config: TrainConfig) -> contextlib.AbstractContextManager[DistEnv]:
    """The process group in which ``ddp.train`` with these settings would train."""
    return process_group(config.device, config.backend, threads=config.threads)


def start(config: TrainConfig, env: DistEnv, steps: int = 0) -> tuple[Job, Iterator[Batch]]:
    """A job after so many steps of its first epoch, and the batches that follow."""
    job = build_job(config, env, load_data(config, env))
    job.sampler.set_epoch(0)
    job.model.train()
    batches = iter(job.loader)
    for _ in range(steps):
        train_step(job, batches)
    return job, batches


def train_epochs(config: TrainConfig) -> Outcome:
    """Train without a run directory."""
    with group_of(config) as env:
        job = build_job(config, env, load_data(config, env))
        losses = []
        for _ in range(config.epochs):
            train_epoch(job)
            losses.append(job.totals.loss)
            job.end_epoch(0.0)
        confusion = evaluate(job.network, job.data, env, config.precision, job.test_loader).confusion
        return Outcome(parameters_of(job), losses, confusion)


def run_job(config: TrainConfig) -> None:
    """The whole of ``ddp.train``, but for its figures."""
    with without_figures(), group_of(config) as env:
        train(config, env)


@contextlib.contextmanager
def without_figures() -> Iterator[None]:
    """Figures take as long as a small run does, and the tests of the command have it draw them."""
    with contextlib.ExitStack() as patches:
        for name in ("plot_curves", "plot_confusion", "plot_samples"):
            patches.enter_context(mock.patch.object(report, name))
        yield


def newest(run_dir: Path) -> RunCheckpoint:
    found = storage.newest(run_dir)
    assert found is not None, f"{run_dir} has no checkpoint"
    return found


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds of weights, of the optimizer's state, and of each rank's buffers, flat."""
    tensors = {f"model.{name}": value for name, value in storage.read(path, "model").items()}
    if keys := shard_keys(path):
        saved, parameters = open_tensors(path, ()), load(path, keys[0])["parameters"]
        for name in saved.shards:
            kind, _, parameter = name.partition(":")
            if kind != WEIGHT:
                tensors[f"optimizer.{parameters.index(parameter)}.{kind}"] = saved.whole(name)
    else:
        for index, state in load(path, "optimizer")["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
    for rank, own in enumerate(storage.read(path, "ranks")):
        tensors |= {f"rank{rank}.{name}": value for name, value in own["buffers"].items()}
    return tensors


def final_state(run_dir: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """A finished run's tensors (weights, optimizer, scaler), flat, and its metrics without the timings."""
    path, manifest = newest(run_dir)
    tensors = tensors_of(path)
    tensors |= {f"scaler.{name}": torch.as_tensor(value) for name, value in manifest.progress["scaler"].items()}
    tensors["progress"] = torch.tensor([manifest.step, manifest.epoch, manifest.progress["best"]["accuracy"]])
    timings = {*TIMES, *(field.name for field in dataclasses.fields(DeviceTotals))}
    records = [{k: v for k, v in record.items() if k not in timings} for record in read_metrics(run_dir)]
    return tensors, records


def assert_identical(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bit for bit, and the same names."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(np.asarray(actual[name]), np.asarray(value)), f"{name} differs"


def assert_close(actual: Arrays, expected: Arrays, tolerance: float) -> None:
    """Every array within ``tolerance`` of the other's largest magnitude."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.abs(actual[name] - value).max() / max(1.0, np.abs(value).max())
        assert difference <= tolerance, f"{name} differs by {difference:.2e}"
