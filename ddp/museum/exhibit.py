"""What all exhibits share: which of the two variants runs, and the number that it ends with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

BROKEN = "--right" not in sys.argv  # the exhibit as it was found, or with the bug fixed

T = TypeVar("T")


def show(what: str, value: float) -> None:
    """Print the number that the exhibit ends with; rank 0 alone.

    :param what: a noun phrase, such as "largest difference of a weight between ranks"
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{what}: {value:.6g}", flush=True)


def spread(model: nn.Module) -> float:
    """The largest difference of any weight between two ranks. A collective."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    return spread_of(weights)


def spread_of(values: Tensor) -> float:
    """The largest difference of any element between two ranks. A collective."""
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return torch.max(high - low).item()


def gradient_error(model: nn.Module, reference: nn.Module) -> float:
    """The distance of a model's gradient from that of one process on the whole global batch, over the latter's norm."""
    ours, theirs = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, reference)
    )
    return float(torch.dist(ours, theirs) / theirs.norm())


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of all gradients together. It changes none, unlike `clip_grad_norm_`, which returns the norm as well."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def gathered(values: Iterable[T]) -> list[T]:
    """The values of all ranks in one list, rank after rank. A collective."""
    parts: list[list[T]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, list(values))
    return [value for part in parts for value in part]


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A temporary folder of rank 0 that all ranks use. A collective, at its beginning and at its end."""
    with TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()  # Rank 0 removes the folder when no rank needs it any more.


def samples(count: int) -> TensorDataset:
    """A small data set of inputs and labels, alike on all ranks that have seeded alike."""
    inputs = torch.randn(count, 4)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def train(model: nn.Module, optimizer: Optimizer, loader: DataLoader[tuple[Tensor, ...]]) -> None:
    """One epoch of training, for exhibits whose bug is somewhere else."""
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
