"""ddp/resilience/guard.py: a step whose loss or gradient is not finite changes nothing on any rank, and is written down.

By both guards: the one that reads in every step, and the one that lets the device decide and reads a step later.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from common.data.datasets import Batch
from common.errors import UsageError
from common.randomness import derive_seed
from common.training.metrics import MetricsWriter, read_metrics
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from ddp.resilience.device_guard import DeviceGuard
from ddp.resilience.guard import NO_FLAGS, Flags, ResilientGuard, sum_of_gradients
from ddp.train import build_job, train_step
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

WORLD_SIZE, MICRO_STEPS, BATCH_SIZE, CULPRIT = 2, 2, 24, 1
SETTINGS: dict[str, Any] = {
    "train_samples": 240, "test_samples": 20, "batch_size": BATCH_SIZE, "grad_accumulation_steps": MICRO_STEPS, "seed": 3,
}  # fmt: skip
NAN_IMAGES, INF_LOSS, INF_GRADIENT = "nan images", "inf loss", "inf gradient"
FIRST_WEIGHT = "features.0.weight"

both_guards = pytest.mark.parametrize("guard", [ResilientGuard, DeviceGuard])
Guard = type[ResilientGuard]


class State(NamedTuple):
    """The state that a skipped step must not change."""

    network: dict[str, Any]
    optimizer: dict[str, Any]
    window: tuple[float, float, int]


class Seen(NamedTuple):
    """A rank before and after the step that goes wrong, and after the next."""

    before: State
    after: State
    later: State
    flags: Flags
    steps: int
    skipped: int
    rate: float
    scales: tuple[float, float]


def state_of(job: Job) -> State:
    momentum = {index: state["momentum_buffer"] for index, state in job.optimizer.state_dict()["state"].items()}
    loss, correct, samples, *_ = job.window.state()
    return State(arrays(job.network.state_dict()), arrays(momentum), (loss, correct, samples))


def arrays(tensors: dict[Any, Tensor]) -> dict[str, Any]:
    return {str(name): value.detach().numpy().copy() for name, value in tensors.items()}


def poisoned(job: Job, how: str, batches: Iterator[Batch]) -> None:
    """A step in which something is not finite on one rank, in one micro-step."""
    calls = iter([True, *[False] * MICRO_STEPS])

    def with_nan(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        images = inputs[0].clone()
        if next(calls):
            images[0, 0, 5, 5] = math.nan
        return (images,)

    def certain(module: nn.Module, inputs: tuple[Tensor], logits: Tensor) -> Tensor:
        """That the label is 0: the loss of all other labels is inf, and its gradient finite."""
        if next(calls):
            logits = logits.masked_fill(torch.arange(logits.shape[1]) > 0, -math.inf)
        return logits

    if job.env.rank != CULPRIT:
        return train_step(job, batches)
    weight = dict(job.network.named_parameters())[FIRST_WEIGHT]
    plants: dict[str, Callable[[], Any]] = {
        INF_LOSS: lambda: job.network.register_forward_hook(certain),
        NAN_IMAGES: lambda: job.network.register_forward_pre_hook(with_nan),
        INF_GRADIENT: lambda: weight.register_hook(lambda gradient: gradient + math.inf if next(calls) else gradient),
    }
    with plants[how]():
        return train_step(job, batches)


@contextlib.contextmanager
def started(config: TrainConfig, guard: Guard) -> Iterator[tuple[Job, Iterator[Batch]]]:
    """A job of this rank with this guard, and the batches of its first epoch."""
    with process_group(threads=1) as env, MetricsWriter(config.run_dir, silent=not env.is_main) as metrics:
        with mock.patch("ddp.train.build_guard", guard):
            job = build_job(config, env, load_data(config, env))
        job.metrics = metrics
        job.sampler.set_epoch(0)
        yield job, job.guard.batches(job.loader)


def skipping(config: TrainConfig, how: str, guard: Guard) -> Seen:
    with started(config, guard) as (job, batches):
        for _ in range(2):
            train_step(job, batches)
        before, scale = state_of(job), job.scaler.get_scale()
        poisoned(job, how, batches)
        assert isinstance(job.guard, ResilientGuard)
        assert guard is ResilientGuard or (job.guard.flags, job.skipped_steps) == (NO_FLAGS, 0)  # not read yet
        job.guard.wait_for_device()
        flags, after = job.guard.flags, state_of(job)
        scales, rate = (scale, job.scaler.get_scale()), job.optimizer.param_groups[0]["lr"]
        steps, skipped = job.step, job.skipped_steps
        train_step(job, batches)
        return Seen(before, after, state_of(job), flags, steps, skipped, rate, scales)


def run(folder: Path, how: str, guard: Guard, **settings: Any) -> tuple[TrainConfig, list[Seen]]:
    folder.mkdir()
    config = small(**SETTINGS, run_dir=folder, **settings)
    return config, run_ranks(skipping, WORLD_SIZE, config, how, guard)


def nothing_has_changed(config: TrainConfig, seen: list[Seen]) -> None:
    for rank in seen:
        np.testing.assert_equal(rank.after._asdict(), rank.before._asdict())
        assert rank.before.window[2] == 2 * BATCH_SIZE // WORLD_SIZE
        assert rank.flags == Flags(not_finite=True)
        assert (rank.steps, rank.skipped) == (3, 1)
        assert rank.rate == config.learning_rates(240 // BATCH_SIZE)(2)  # the schedule goes on
        assert rank.later.window[2] == 3 * BATCH_SIZE // WORLD_SIZE
        weights = rank.later.network[FIRST_WEIGHT]
        assert np.isfinite(weights).all() and not np.array_equal(weights, rank.after.network[FIRST_WEIGHT])
        np.testing.assert_equal(weights, seen[0].later.network[FIRST_WEIGHT])


def samples_of_step(step: int) -> list[int]:
    """By torch's own sampler, rank by rank."""
    per_rank, found = BATCH_SIZE // WORLD_SIZE, []
    for rank in range(WORLD_SIZE):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(240),  # type: ignore[arg-type]
            WORLD_SIZE,
            rank,
            shuffle=True,
            seed=derive_seed(SETTINGS["seed"], "shuffle"),
            drop_last=True,
        )
        sampler.set_epoch(0)
        found += list(sampler)[step * per_rank : (step + 1) * per_rank]
    return found


@both_guards
@pytest.mark.parametrize(
    ("precision", "strategy"), [("fp32", "torch"), ("bf16", "handwritten"), ("fp16", "torch"), ("fp16", "handwritten")]
)
def test_a_nan_on_one_rank_changes_nothing_on_any(tmp_path: Path, guard: Guard, precision: str, strategy: str) -> None:
    """A nan on one rank changes no parameter and no optimizer state on any rank.

    Claim (ddp/resilience/README.md): nan and inf are skipped by all ranks; too many end the run.
    """
    config, seen = run(tmp_path / "run", NAN_IMAGES, guard, precision=precision, strategy=strategy)
    nothing_has_changed(config, seen)
    for rank in seen:
        assert rank.scales == ((65536.0, 32768.0) if precision == "fp16" else (1.0, 1.0))
    (record,) = read_metrics(config.run_dir)
    assert {name: record[name] for name in ("kind", "step", "epoch")} == {"kind": "skipped", "step": 3, "epoch": 0}
    assert sorted(record["samples"]) == sorted(samples_of_step(2))
    (first, second), (wrong, right) = record["losses"]
    assert wrong == "nan"
    assert all(isinstance(loss, float) and 0 < loss < 10 for loss in (first, second, right))


@both_guards
@pytest.mark.parametrize(
    ("how", "settings", "losses"),
    [
        *((INF_LOSS, {"precision": precision}, "inf") for precision in ("fp32", "bf16", "fp16")),
        *((INF_GRADIENT, {"clip_norm": clip_norm}, None) for clip_norm in (None, 1.0)),
    ],
)
def test_an_infinite_loss_or_gradient_alone_is_enough(
    tmp_path: Path, guard: Guard, how: str, settings: dict[str, Any], losses: str | None
) -> None:
    config, seen = run(tmp_path / "run", how, guard, **settings)
    nothing_has_changed(config, seen)
    (record,) = read_metrics(config.run_dir)
    assert (record["kind"], record["step"]) == ("skipped", 3)
    assert [loss for of_rank in record["losses"] for loss in of_rank if isinstance(loss, str)] == (
        [losses] if losses else []
    )


@both_guards
def test_the_scaler_skips_a_gradient_that_overflows_by_itself(tmp_path: Path, guard: Guard) -> None:
    config, seen = run(tmp_path / "run", INF_GRADIENT, guard, precision="fp16")
    for rank in seen:
        parameters = [name for name in rank.before.network if name.endswith(("weight", "bias"))]
        for name in parameters:
            np.testing.assert_equal(rank.after.network[name], rank.before.network[name])
        np.testing.assert_equal(rank.after.optimizer, rank.before.optimizer)
        assert (rank.flags, rank.steps, rank.skipped, rank.scales) == (Flags(), 3, 0, (65536.0, 32768.0))
    assert read_metrics(config.run_dir) == []


def too_many(config: TrainConfig, guard: Guard) -> tuple[str, int, bool]:
    """The line about the last of these steps, all of which go wrong; and whether the weights are as they were."""
    with started(config, guard) as (job, batches):
        before = copy.deepcopy(job.network.state_dict())
        for _ in range(config.max_skipped_steps):
            poisoned(job, NAN_IMAGES, batches)
        if guard is DeviceGuard:  # says it one step later, and does not take that step
            poisoned(job, NAN_IMAGES, batches)
        with pytest.raises(UsageError) as caught:
            poisoned(job, NAN_IMAGES, batches)
        assert caught.value.seen_by_all
        after = job.network.state_dict()
        if guard is DeviceGuard:  # the step that was not taken has left its statistics; nothing saves them any more
            before = {name: value for name, value in before.items() if "running" not in name and "num_" not in name}
        unchanged = all(torch.equal(after[name], value) for name, value in before.items())
        return str(caught.value), job.skipped_steps, unchanged


@both_guards
@pytest.mark.parametrize("most", [0, 2])
def test_one_step_too_many_ends_all_ranks_with_the_same_words(tmp_path: Path, guard: Guard, most: int) -> None:
    """One skipped step too many ends all ranks with the same line.

    Claim (ddp/resilience/README.md): nan and inf are skipped by all ranks; too many end the run.
    """
    config = small(**SETTINGS, run_dir=tmp_path, max_skipped_steps=most)
    first, second = run_ranks(too_many, WORLD_SIZE, config, guard)
    assert first == second
    message, skipped, unchanged = first
    assert message.startswith(
        f"the loss was nan on rank {CULPRIT} at step {most + 1}: {most + 1} steps had to be skipped, more than "
        f"--max-skipped-steps {most}: try a lower --lr"
    )
    assert (skipped, unchanged) == (most + 1, True)
    assert [(record["kind"], record["step"]) for record in read_metrics(tmp_path)] == [
        ("skipped", step) for step in range(1, most + 2)
    ]


@pytest.mark.parametrize(
    ("value", "finite"), [(1.0, True), (1e38, True), (math.nan, False), (math.inf, False), (-math.inf, False)]
)
def test_one_value_among_many_tells(value: float, finite: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(3, 4)) for _ in range(3)]
    for parameter in parameters[:2]:
        parameter.grad = torch.zeros(3, 4)
    assert parameters[1].grad is not None
    parameters[1].grad[1, 2] = value
    assert bool(sum_of_gradients(parameters).isfinite()) is finite
