"""What each guard of a training step takes by itself, which is too little to be seen in the times of whole steps: those differ
more from one to the next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from common.reporting.timing import interleave, synchronize
from ddp.job import Job
from ddp.resilience.flags import NO_FLAGS, FlagCarrier, raise_flags
from ddp.resilience.nonfinite import sum_of_gradients

WARMUP = 5
OUT_OF_CACHE = 2**24  # float32 elements, 64 MiB: a step needs as much memory between one use of a guard and the next
PHASES = ("data", "forward", "backward", "optimizer")


def time_guards(job: Job, rounds: int) -> dict[str, list[float]]:
    """Seconds that each guard adds to a step, one number per round: with it, less without it, so that noise may be below zero.

    :param job: whose gradients are replaced by ones, and whose learning rate becomes 0
    """
    network, optimizer, device = job.network, job.optimizer, job.env.device
    gradients = [torch.ones_like(parameter) for parameter in network.parameters()]
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        parameter.grad = gradient
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    carrier = FlagCarrier(nn.Identity(), device)
    loss = torch.ones((), device=device, requires_grad=True)
    others = torch.zeros(OUT_OF_CACHE, device=device)

    def look() -> None:
        math.isfinite(sum_of_gradients(network.parameters()))

    def carry_flags() -> None:
        raise_flags(loss * 1, carrier.flags.clone(), NO_FLAGS).backward()
        carrier.agreed()

    def say_where() -> None:
        for phase in PHASES:
            job.watchdog.at(job.step, phase)

    def timed(*work: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            others.add_(1)
            torch._foreach_mul_(gradients, 1.0)  # as DDP has just written them when a step comes to look at them
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
            "look and update": timed(look, optimizer.step),
            "backward": timed(lambda: (loss * 1).backward()),
            "backward with flags": timed(carry_flags),
            "nothing": timed(),
            "statistics": timed(job.statistics.keep),
            "positions": timed(say_where),
        },
        rounds,
        WARMUP,
    )
    pairs = {
        "look at the gradients": ("look and update", "update"),
        "flags": ("backward with flags", "backward"),
        "statistics kept": ("statistics", "nothing"),
        "positions for the watchdog": ("positions", "nothing"),
    }
    return {
        name: [a - b for a, b in zip(taken[with_it], taken[without], strict=True)]
        for name, (with_it, without) in pairs.items()
    }
