"""dataparallel/parallel.py on GPUs: equal to the plain module on one, and to ``nn.DataParallel`` on several."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dataparallel.parallel import HandwrittenDataParallel
from tests.dataparallel.modules import (
    assert_same,
    batch_sizes,
    images,
    outcome,
    random_cases,
    random_models,
    rows,
)
from tests.support.zoo.named import loss_of

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def on_gpu(module: nn.Module) -> nn.Module:
    """There. A buffer that is trained is a leaf again: moving it was an operation that autograd has recorded."""
    for part in module.cuda(0).modules():
        for name, buffer in part.named_buffers(recurse=False):
            if not buffer.is_leaf:
                setattr(part, name, buffer.detach().requires_grad_())
    return module


@pytest.mark.gpu
@settings(max_examples=30)
@random_cases
def test_one_gpu_several_times_equals_the_plain_module(model: nn.Module, dim: int, count: int, samples: int) -> None:
    on_gpu(model)
    x = images(samples, dim).detach().cuda(0).requires_grad_()
    expected = outcome(copy.deepcopy(model), x)
    assert_same(outcome(HandwrittenDataParallel(model, ["cuda:0"] * count, dim), x), expected)


def both(module: nn.Module, dim: int = 0) -> tuple[HandwrittenDataParallel, nn.DataParallel[nn.Module]]:
    """The hand-written and torch's wrapper on all GPUs, each around a copy of the module."""
    devices = list(range(torch.cuda.device_count()))
    theirs = nn.DataParallel(on_gpu(copy.deepcopy(module)), devices, dim=dim)
    return HandwrittenDataParallel(on_gpu(module), devices, dim), theirs


@pytest.mark.gpu
@two_gpus
@settings(max_examples=40)
@given(
    model=random_models,
    dim=st.shared(st.sampled_from([0, 1, -1]), key="dim"),
    samples=batch_sizes,
)
def test_random_models_equal_torch_s_own(model: nn.Module, dim: int, samples: int) -> None:
    """On GPUs, outputs and gradients are those of ``nn.DataParallel``; unused parameters have no gradient instead of zeros.

    The exception: parameters that no replica used, whose gradients are zeros in torch and None here.

    Claim (dataparallel/README.md): on GPUs, of `nn.DataParallel`.
    """
    ours, theirs = both(model, dim)
    outputs, actual, inputs = outcome(ours, images(samples, dim))
    their_outputs, expected, their_inputs = outcome(theirs, images(samples, dim))
    assert_same((outputs, inputs), (their_outputs, their_inputs))
    for name, gradient in expected.items():
        if actual[name] is None and gradient is not None:
            assert not gradient.any()
        else:
            assert_same(actual[name], gradient)


@pytest.mark.gpu
@two_gpus
def test_training_with_batchnorm_equals_torch_s_own() -> None:
    torch.manual_seed(0)
    ours, theirs = both(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double())
    samples = 3 * torch.cuda.device_count() + 2
    for forward in (ours, theirs):
        learner = torch.optim.SGD(forward.parameters(), lr=0.1, momentum=0.9)
        for seed in range(3):
            learner.zero_grad()
            loss_of(forward(rows(samples, seed=seed))).backward()
            learner.step()
    assert_same(ours.state_dict(), theirs.state_dict())
    assert_same(ours.eval()(rows(samples)), theirs.eval()(rows(samples)))


@pytest.mark.gpu
@two_gpus
def test_gradients_on_streams_of_one_s_own_are_waited_for() -> None:
    """The second device is late with its gradient, and its default stream is idle."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if gradient.device.index == 1:
                torch.cuda._sleep(100_000_000)
            return gradient.clone()

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1 << 20))

        def forward(self, x: Tensor) -> Any:
            return (x[:, None] * Slow.apply(self.weight)).sum(1)

    wrapper = HandwrittenDataParallel(Product().cuda(0), [0, 1])
    streams = [torch.cuda.Stream(device) for device in (0, 1)]
    with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]), torch.cuda.device(0):
        for step in range(1, 4):
            wrapper(torch.tensor([1.0, 2.0])).sum().backward()
            gradient = wrapper.module.weight.grad
            assert isinstance(gradient, Tensor) and torch.equal(gradient, torch.full_like(gradient, 3 * step))
