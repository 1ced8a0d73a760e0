"""The frame of the cases: numbers that are easy to follow, and a run with torch's DDP, then with ours.

Each run has a process group of its own, so that nothing is left of one that failed in the middle of a collective.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import ddp.by_hand
from common.errors import UsageError

Wrapper = Callable[..., Any]
Case = Callable[[Any], Iterator[str]]
WRAPPERS: dict[str, Any] = {"torch": DistributedDataParallel, "ours": ddp.by_hand.DistributedDataParallel}
SETUP = timedelta(seconds=60)


def linear() -> nn.Linear:
    """``y = weight * x`` with a weight of 1."""
    network = nn.Linear(1, 1, bias=False)
    nn.init.ones_(network.weight)
    return network


class TwoLayers(nn.Module):
    """``a`` and ``b``: the sum of those that a forward pass is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in which]).sum(0)


def inputs() -> Tensor:
    """``[1, 1]``: 1 on rank 0, 3 on rank 1."""
    return torch.tensor([[1.0 + 2.0 * dist.get_rank()]])


def grad(parameter: Tensor) -> str:
    """A gradient of one element, or None."""
    return "None" if parameter.grad is None else f"{parameter.grad.sum().item():g}"


def hang_for_two_seconds() -> None:
    """From here on, gloo gives up after two seconds."""
    # Its names since torch 2.15, and before.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=2))


def shared_store() -> tuple[Store, int]:
    """The store of the two ranks, and the number of this one.

    :raises UsageError: unless torchrun has started two
    """
    if os.environ.get("WORLD_SIZE") != "2":
        raise UsageError(
            "a case runs on two ranks: start it with 'torchrun --nproc_per_node=2' in the place of 'python'"
        )
    store, rank, _ = next(rendezvous("env://"))
    return store, rank


def compare(case: Case, store: Store, rank: int) -> list[str]:
    """The lines that a case yields with each wrapper, on all ranks."""
    lines = []
    for name, wrap in WRAPPERS.items():
        mine = PrefixStore(f"{case.__name__}/{name}", store)
        mine.set(str(rank), json.dumps(run(case, wrap, mine, rank)))
        ranks = [json.loads(mine.get(str(other))) for other in range(2)]
        if ranks[0] == ranks[1]:
            lines += [f"{name:5}  {line}" for line in ranks[0]]
        else:
            lines += [f"{name:5}  rank {other}: {line}" for other in range(2) for line in ranks[other]]
    return lines


def run(case: Case, wrap: Wrapper, store: Store, rank: int) -> list[str]:
    """The lines that a case yields on this rank, and the error with which it ends, if any."""
    lines: list[str] = []
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=SETUP)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for line in case(wrap):  # one by one: those before an error count
                lines.append(line)  # noqa: PERF402
    except Exception as error:
        lines.append(shown(error))
    finally:
        dist.destroy_process_group()
    return lines


def shown(error: Exception) -> str:
    """An error's type, and its first sentence."""
    if "gloo/transport" in str(error) or "pair closure" in str(error):
        return "hangs: waits for the other rank"
    sentence = re.split(r'[.;]\s|\n| at "|\.$|(?<=CUDA error): ', str(error))[0]
    return f"{type(error).__name__}: {sentence}"
