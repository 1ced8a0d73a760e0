"""common/training/optimization.py: the schedules against torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from common.training.optimization import build_optimizer, learning_rate


def torch_rates(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        scheduler.optimizer.step()
        scheduler.step()
    return rates


def sgd(rate: float) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)


@given(total=st.integers(10, 80), share=st.floats(0.2, 0.8), peak=st.floats(1e-4, 1.0))
def test_one_cycle_is_torch_s(total: int, share: float, peak: float) -> None:
    """The one-cycle schedule has the learning rates of torch's OneCycleLR.

    Claim (ddp/README.md, 6): the learning rate of each step reaches the optimizer; schedules are torch's.
    """
    warmup = round(share * total)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        sgd(peak), max_lr=peak, total_steps=total, pct_start=warmup / total, cycle_momentum=False
    )
    ours = [
        learning_rate(step, schedule="one-cycle", peak=peak, warmup_steps=warmup, total_steps=total)
        for step in range(total)
    ]
    # torch places the peak at pct_start * total_steps - 1, in floating point
    assert ours == pytest.approx(torch_rates(theirs, total), rel=1e-6)


@given(total=st.integers(2, 80), peak=st.floats(1e-4, 1.0))
def test_cosine_is_torch_s(total: int, peak: float) -> None:
    """The cosine schedule has the learning rates of torch's LinearLR and CosineAnnealingLR.

    Claim (ddp/README.md, 6): the learning rate of each step reaches the optimizer; schedules are torch's.
    """
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(sgd(peak), T_max=total)
    ours = [
        learning_rate(step, schedule="cosine", peak=peak, warmup_steps=0, total_steps=total) for step in range(total)
    ]
    assert ours == pytest.approx(torch_rates(theirs, total), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_warm_up_rises_in_equal_steps_to_the_peak(schedule: str) -> None:
    rates = [learning_rate(s, schedule=schedule, peak=0.5, warmup_steps=4, total_steps=20) for s in range(20)]
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert max(rates) == rates[4]
    if schedule == "constant":
        assert set(rates[4:]) == {0.5}
    else:
        assert rates[12] == pytest.approx(0.25)
        assert rates[19] == pytest.approx(0.25 * (1 + math.cos(math.pi * 15 / 16)))


@pytest.mark.parametrize("schedule", ["constant", "cosine", "one-cycle"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (1, 1), (1, 2), (5, 5)])
def test_the_shortest_runs_have_a_positive_rate(schedule: str, warmup: int, total: int) -> None:
    for step in range(total):
        rate = learning_rate(step, schedule=schedule, peak=0.1, warmup_steps=warmup, total_steps=total)
        assert 0 < rate <= 0.1


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_fused_optimizers_equal_torch_s_plain_ones(name: str, momentum: float) -> None:
    plain: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=momentum, nesterov=momentum > 0, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.01),
    }
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer = build_optimizer(name, [ours], momentum=momentum, weight_decay=0.01)
    optimizer.param_groups[0]["lr"] = 0.1
    reference = plain[name]([theirs])
    for _ in range(5):
        gradient = torch.randn(50, generator=generator)
        for parameter, stepper in ((ours, optimizer), (theirs, reference)):
            parameter.grad = gradient.clone()
            stepper.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
