"""The cost of each guard of a training step, timed by itself.

A guard costs less than two steps differ from each other, so the times of whole steps cannot show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from common.reporting.timing import interleave, synchronize
from common.training.optimization import set_learning_rate
from ddp.job import Job
from ddp.resilience.flags import NO_FLAGS, WithFlags
from ddp.resilience.guard import ResilientGuard, sum_of_gradients

WARMUP = 5
OUT_OF_CACHE = 2**24  # float32 elements, 64 MiB; writing them evicts the gradients from the caches, as a real step does
PHASES = ("data", "training")


def time_guards(job: Job, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds that each guard adds to a step.

    Each number is the time with the guard less the time without it, so noise can make it negative.

    :param job: its gradients are replaced by ones, and its learning rate becomes 0
    :param rounds: how often each guard is timed
    :returns: for each guard its seconds, one entry per round
    """
    network, optimizer, device = job.network, job.optimizer, job.env.device
    gradients = [torch.ones_like(parameter) for parameter in network.parameters()]
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        parameter.grad = gradient
    set_learning_rate(optimizer, 0.0)
    guard = job.guard
    assert isinstance(guard, ResilientGuard)
    flagged = WithFlags(nn.Identity(), device)
    loss = torch.ones((), device=device, requires_grad=True)
    others = torch.zeros(OUT_OF_CACHE, device=device)

    def check_gradients() -> None:
        sum_of_gradients(network.parameters()).isfinite().item()

    def attach_flags() -> None:
        flagged.attach(loss * 1, NO_FLAGS).backward()
        flagged.reduced()

    def report_phases() -> None:
        for phase in PHASES:
            job.watchdog.at(job.step, phase)

    def timed(*work: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            others.add_(1)
            torch._foreach_mul_(gradients, 1.0)  # the step checks gradients that DDP has just written
            synchronize([device])
            began = time.perf_counter()
            for part in work:
                part()
            synchronize([device])
            return time.perf_counter() - began

        return seconds

    taken = interleave(
        {
            "update": timed(optimizer.step),
            "check and update": timed(check_gradients, optimizer.step),
            "backward": timed(lambda: (loss * 1).backward()),
            "backward with flags": timed(attach_flags),
            "nothing": timed(),
            "statistics": timed(guard.save),
            "phases": timed(report_phases),
        },
        rounds,
        WARMUP,
    )
    pairs = {
        "check of the gradients": ("check and update", "update"),
        "flags": ("backward with flags", "backward"),
        "statistics saved": ("statistics", "nothing"),
        "phases for the watchdog": ("phases", "nothing"),
    }
    return {
        name: [a - b for a, b in zip(taken[with_it], taken[without], strict=True)]
        for name, (with_it, without) in pairs.items()
    }
