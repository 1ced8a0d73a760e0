"""``common.training.precision``: what runs in low precision; what the scaler does with fp16; and how fp32 is rounded."""

from __future__ import annotations

import math
import os
import warnings

import pytest
import torch
from torch import nn

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.training.precision import PRECISIONS, autocast, set_arithmetic
from ddp.rendezvous.launch_facts import launch_facts
from tests.support.launch import run_ranks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

on_every_device = pytest.mark.parametrize(
    "device",
    [torch.device("cpu"), pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)],
    ids=str,
)


def scaler_of(precision: str, device: torch.device) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")


def step(
    precision: str, scaler: torch.amp.GradScaler, model: nn.Linear, optimizer: torch.optim.Optimizer, size: float = 1.0
) -> None:
    """One training step as ``ddp.train`` does it; the loss grows with ``size``."""
    optimizer.zero_grad()
    inputs = torch.full((4, model.in_features), 0.5, device=model.weight.device)
    with autocast(model.weight.device, precision):
        loss = model(inputs).float().square().mean() * size
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def build(device: torch.device) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2).to(device)
    with torch.no_grad():
        model.weight.fill_(0.25)
        model.bias.fill_(0.5)
    return model, torch.optim.SGD(model.parameters(), lr=0.125)


@on_every_device
@pytest.mark.parametrize("name", PRECISIONS)
def test_products_take_the_low_precision_and_weights_stay_fp32(name: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).to(device)
    with autocast(device, name):
        result = model(torch.ones(1, 1, 4, 4, device=device))
    assert result.dtype == DTYPES[name]
    result.float().sum().backward()
    assert {p.dtype for p in model.parameters()} | {p.grad.dtype for p in model.parameters() if p.grad is not None} == {
        torch.float32
    }


@on_every_device
@pytest.mark.parametrize("name", PRECISIONS)
def test_the_same_step_in_every_precision_makes_the_same_update(name: str, device: torch.device) -> None:
    reference, optimizer = build(torch.device("cpu"))
    step("fp32", scaler_of("fp32", torch.device("cpu")), reference, optimizer)
    model, optimizer = build(device)
    step(name, scaler_of(name, device), model, optimizer)
    assert not torch.equal(model.weight.cpu(), build(torch.device("cpu"))[0].weight)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-2, atol=1e-3)


@on_every_device
def test_fp16_skips_a_step_that_overflows_and_halves_the_scale(device: torch.device) -> None:
    """In fp16, a step that overflows is skipped on all ranks, and the scale is halved.

    Claim (ddp/README.md, 6): fp16 skips a step that overflows and halves the scale.
    """
    scaler = scaler_of("fp16", device)
    model, optimizer = build(device)
    before = [parameter.clone() for parameter in model.parameters()]
    scale = scaler.get_scale()
    step("fp16", scaler, model, optimizer, size=math.inf)
    assert scaler.get_scale() == scale / 2
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    step("fp16", scaler, model, optimizer)
    assert not any(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))


def settings_on_a_gpu(tf32: bool, deterministic: bool) -> tuple[object, ...]:
    """The settings that torch reports after it, by its new names and by the old ones, which fail if they contradict each other."""
    before = torch.get_float32_matmul_precision()
    set_arithmetic(torch.device("cpu"), not tf32, False, False)
    assert torch.get_float32_matmul_precision() == before  # oneDNN's too
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_arithmetic(torch.device("cuda"), tf32, deterministic, not deterministic)
    launch_facts(DistEnv.alone(torch.device("cpu")), None)  # reads some of them
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        *(products.fp32_precision == "tf32", convolutions.conv.fp32_precision == "tf32"),  # type: ignore[attr-defined]
        *(products.allow_tf32, convolutions.allow_tf32),
        *(
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            convolutions.benchmark,
        ),
    )


def test_products_and_convolutions_round_to_tf32_or_neither_and_algorithms_are_chosen() -> None:
    """Products and convolutions both round to TF32, or neither; the flags choose the algorithms.

    Claim (ddp/README.md, 6): fp32's products and convolutions are both rounded to TF32, or neither.
    """
    rounded = (True, True, True, True, False, None, True)
    assert run_ranks(settings_on_a_gpu, 1, True, False, fresh=True) == [rounded]
    exact = (False, False, False, False, True, ":4096:8", False)
    assert run_ranks(settings_on_a_gpu, 1, False, True, fresh=True) == [exact]


def test_a_workspace_that_is_not_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(
        UsageError, match=r"^--deterministic: CUBLAS_WORKSPACE_CONFIG is :0:0: set it to :4096:8 or :16:8"
    ):
        set_arithmetic(torch.device("cpu"), True, True, False)
