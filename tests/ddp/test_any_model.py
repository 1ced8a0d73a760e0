"""ddp/train.py on models that users have: layouts, dtypes, shared modules, and buffers that forward changes."""

from __future__ import annotations

import logging
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.errors import UsageError
from common.models.modules import make_dense
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.resilience.guard import SavedBuffers
from ddp.train import build_job, train_epoch
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

SIDE = 28 * 28


class Linear(nn.Module):
    """Logits of images, by one weight ``[classes, pixels]`` in the layout that ``lay_out`` gives it."""

    def __init__(self, classes: int, lay_out: Any) -> None:
        super().__init__()
        weight = torch.randn(classes, SIDE, generator=torch.Generator().manual_seed(0)) / 28
        self.weight = nn.Parameter(lay_out(weight))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.linear(images.flatten(1), self.weight)


def contiguous(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Linear(classes, Tensor.contiguous)


def with_gaps(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Linear(classes, lambda weight: weight.repeat_interleave(2, 1)[:, ::2])


class Counting(nn.Module):
    """A linear layer that counts its training passes in a buffer that it assigns, in a number, in lists, a tensor and an object."""

    passes: Tensor
    mean: Tensor

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(SIDE, classes)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(SIDE))
        self.number, self.seen = 0, list[int]()
        self.others: Any = SimpleNamespace(lists={"a": deque[int]()}, tensor=torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.passes = self.passes + 1
            self.number += 1
            self.seen.append(len(images))
            self.others.lists["a"].append(1)
            self.others.tensor += 1
            self.mean = 0.9 * self.mean + 0.1 * images.detach().flatten(1).mean(0)
        logits: Tensor = self.linear(images.flatten(1) - self.mean)
        return logits


def counting(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Counting(classes)


def few_steps(model: str, **settings: Any) -> TrainConfig:
    return small(model=f"{__name__}:{model}", train_samples=720, test_samples=100, **settings)


def losses(config: TrainConfig) -> list[float]:
    """The mean loss of each epoch."""
    with process_group() as env:
        job, means = build_job(config, env, load_data(config, env)), []
        for _ in range(config.epochs):
            train_epoch(job)
            means.append(job.totals.loss)
            job.end_epoch(0.0)
        return means


@pytest.mark.parametrize("strategy", ["torch", "naive", "handwritten", "zero1", "zero3"])
def test_gaps_in_memory_change_no_bit(strategy: str) -> None:
    """A weight whose memory has gaps trains to the bits of a contiguous one."""
    dense, gaps = (
        run_ranks(losses, 2, few_steps(model, strategy=strategy, optimizer="adam", lr=0.01, epochs=2))
        for model in ("contiguous", "with_gaps")
    )
    assert gaps == dense


@pytest.mark.parametrize(
    ("network", "problem"),
    [
        (nn.ParameterList([torch.zeros(1).expand(8)]), "parameter 0 was expanded"),
        (nn.Sequential(nn.Embedding(3, 4, sparse=True)), "0 has sparse gradients"),
    ],
)
def test_what_no_optimizer_can_update_is_refused(network: nn.Module, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        make_dense(network)


def counting_in_a_parameter(shape: tuple[int, int, int], classes: int) -> nn.Module:
    network = Linear(classes, Tensor.contiguous)
    network.passes = nn.Parameter(torch.zeros(()), requires_grad=False)
    network.register_forward_pre_hook(
        lambda module, _: setattr(network.passes, "data", network.passes + module.training)
    )
    return network


def refused() -> None:
    with process_group() as env:
        config = few_steps("counting_in_a_parameter")
        with pytest.raises(UsageError, match="forward writes to the frozen parameter passes"):
            build_job(config, env, load_data(config, env))


def test_a_frozen_parameter_that_forward_writes_is_refused() -> None:
    run_ranks(refused, 2)


def counted() -> tuple[int, int, int, list[Any], str]:
    with process_group() as env:
        config = few_steps("counting")
        job = build_job(config, env, load_data(config, env))
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ddp.train").addHandler(handler)
        logging.getLogger("ddp.train").setLevel(logging.INFO)
        train_epoch(job)
        logging.getLogger("ddp.train").removeHandler(handler)
        network: Any = job.network
        assert len(network.others.lists["a"]) == network.others.tensor == 5
        return int(network.passes), network.number, len(network.seen), network.mean.tolist(), " ".join(messages)


def test_forward_passes_are_counted_once_and_other_buffers_are_rank_0_s_at_the_end_of_an_epoch() -> None:
    """After an epoch of five steps, buffers and Python attributes have counted five; other buffers are rank 0's.

    Claim (ddp/README.md, 7): buffers that are not BatchNorm's are rank 0's at the end of each epoch.
    """
    first, second = run_ranks(counted, 2)
    assert first[:3] == second[:3] == (5, 5, 5)
    assert first[3] == second[3]
    assert "mean" in first[4]
    assert "passes" not in first[4]
    assert second[4] == ""


def test_a_skipped_step_leaves_the_tensor_that_was_there_whichever_side_decides() -> None:
    for where in (None, torch.tensor(True), torch.tensor(False)):
        network = nn.Sequential(nn.BatchNorm1d(2))
        network.register_buffer("grown", torch.zeros(0))
        network.register_buffer("assigned", torch.zeros(3))
        kept = {name: (buffer, buffer.clone()) for name, buffer in network.named_buffers()}
        saved = SavedBuffers(network)
        saved.save()
        network(torch.randn(4, 2))
        network.grown, network.assigned = torch.ones(5), torch.full((3,), torch.nan)
        saved.restore(where)
        for name, buffer in network.named_buffers():
            if where is None or where:
                assert buffer is kept[name][0]
                assert torch.equal(buffer, kept[name][1])
            else:
                assert not torch.equal(buffer, kept[name][1])
