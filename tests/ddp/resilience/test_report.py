"""The report of a step (ddp/resilience/guard.py): what one rank knows, all know after the step, and nothing else changes by it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp.data import load_data
from ddp.job import Job, StepGuard
from ddp.rendezvous.process_group import process_group
from ddp.resilience.device_guard import DeviceGuard
from ddp.resilience.guard import Flags, ResilientGuard
from ddp.train import build_job, train_step
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

RANKS, MICRO_STEPS = 3, 2
Guard = type[ResilientGuard]
SETTINGS: dict[str, Any] = {
    "train_samples": 240, "test_samples": 20, "batch_size": 12, "grad_accumulation_steps": MICRO_STEPS, "max_skipped_steps": 1000,
}  # fmt: skip


class Known(NamedTuple):
    """A flag, and the rank that knows it in a step; ``not_finite`` by the loss of a micro-step."""

    flag: str
    rank: int
    micro_step: int = 0


# A step in which nobody knows anything, each flag on each rank, a loss in each micro-step, and two ranks at once.
STEPS: list[list[Known]] = [
    [],
    *([Known(flag, rank)] for flag in ("stop", "save") for rank in range(RANKS)),
    *([Known("not_finite", rank, step)] for rank in range(RANKS) for step in range(MICRO_STEPS)),
    [Known("save", 0), Known("not_finite", 2, 1)],
    [Known("stop", 1), Known("save", 0)],
    [],
]


def agreed(folder: Path, guard: Guard, precision: str) -> list[Flags]:
    """The flags that this rank reads after each step."""
    with process_group(threads=1) as env, mock.patch("ddp.train.build_guard", guard):
        config = small(**SETTINGS, precision=precision, run_dir=folder)
        job = build_job(config, env, load_data(config, env))
        assert isinstance(job.guard, ResilientGuard)
        job.sampler.set_epoch(0)
        batches = job.guard.batches(job.loader)
        found = []
        for known in STEPS:
            mine = [one for one in known if one.rank == env.rank]
            flags = {one.flag for one in mine}
            job.guard.stop.number = 15 if "stop" in flags else None
            job.guard.checkpointer = mock.Mock(due_at=-math.inf if "save" in flags else math.inf)
            with infinite_losses(job, [one.micro_step for one in mine if one.flag == "not_finite"]):
                train_step(job, batches)
            job.guard.wait_for_device()
            found.append(job.guard.flags)
        return found


def infinite_losses(job: Job, micro_steps: list[int]) -> Any:
    """Let the logits of these forward passes be inf."""
    passes = itertools.count()

    def hook(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        return logits * math.inf if next(passes) in micro_steps else logits

    return job.network.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("guard", "precision"), [(ResilientGuard, "fp32"), (DeviceGuard, "fp32"), (ResilientGuard, "fp16")]
)
def test_what_any_rank_knows_all_know_after_the_step(tmp_path: Path, guard: Guard, precision: str) -> None:
    """A flag that any rank knows in any micro-step reaches all ranks, and does not outlast its step.

    Claim (ddp/resilience/README.md): one small all-reduce in each step tells all ranks what each knows.
    """
    expected = [Flags(*(name in {one.flag for one in known} for name in Flags._fields)) for known in STEPS]
    for found in run_ranks(agreed, RANKS, tmp_path, guard, precision):
        assert found == expected


def weights_with_and_without(folder: Path) -> list[bool]:
    """Whether the weights after two steps are the same bits with the guard and with the one that does nothing."""
    with process_group(threads=1) as env:
        config = small(**SETTINGS, run_dir=folder)
        weights = []
        for guarded in (True, False):
            job = build_job(config, env, load_data(config, env))
            if not guarded:
                job.guard = StepGuard()
            job.sampler.set_epoch(0)
            batches = job.guard.batches(job.loader)
            for _ in range(2):
                train_step(job, batches)
            weights.append([parameter.detach().clone() for parameter in job.network.parameters()])
        return [torch.equal(one, other) for one, other in zip(*weights, strict=True)]


def test_the_guard_changes_no_bit(tmp_path: Path) -> None:
    """The weights are the same bits without the guard.

    Claim (ddp/resilience/README.md): the report changes no bit.
    """
    for rank in run_ranks(weights_with_and_without, 2, tmp_path):
        assert rank and all(rank)


def order_of_collectives(folder: Path) -> list[str]:
    """The events of a step, in their order: its first parameter's gradients, and the report's beginning and end."""
    events: list[str] = []
    begin = dist.all_reduce

    def all_reduce(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        work = begin(tensor, *arguments, **more)
        events.append("the report begins")

        def wait() -> None:
            events.append("it is waited for")
            work.wait()

        return mock.Mock(wait=wait)

    with process_group(threads=1) as env:
        config = small(**SETTINGS, run_dir=folder)
        job = build_job(config, env, load_data(config, env))
        job.sampler.set_epoch(0)
        batches = job.guard.batches(job.loader)
        first = next(job.network.parameters())  # the last whose gradient is ready
        first.register_post_accumulate_grad_hook(lambda _: events.append("a gradient"))
        with mock.patch.object(dist, "all_reduce", all_reduce):
            train_step(job, batches)
    return events


def test_the_report_travels_during_the_last_backward_pass(tmp_path: Path) -> None:
    for events in run_ranks(order_of_collectives, 2, tmp_path):
        assert events == ["a gradient", "the report begins", "a gradient", "it is waited for"]
