"""The common part of all exhibits: which of the two variants runs, what it trains, and the number that it ends with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group, which it would keep: ddp/resilience/README.md, "A clean exit"
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BROKEN = "--right" not in sys.argv  # the exhibit as it was found, or with the bug fixed


def start() -> tuple[int, int]:
    """Make the process group, and seed all ranks alike.

    :return: the rank, and the number of ranks
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def finish(what: str, value: float) -> None:
    """Print the number that the exhibit ends with, on rank 0 alone, and leave the process group.

    :param what: a noun phrase, such as "largest difference of a weight between ranks"
    """
    if dist.get_rank() == 0:
        print(f"{what}: {value:.6g}", flush=True)
    dist.destroy_process_group()


def ddp_and_sgd(outputs: int = 2) -> tuple[DistributedDataParallel, Optimizer]:
    """The model of most exhibits: a linear layer in DDP, which sends the weights of rank 0 to all ranks, and its optimizer."""
    model = DistributedDataParallel(nn.Linear(8, outputs))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(count: int = 10) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (16, 8) and labels (16), which each rank draws from a generator of its own."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        inputs = torch.randn(16, 8, generator=generator)
        yield inputs, _labels(inputs)


def samples(count: int) -> TensorDataset:
    """A small data set of such inputs and labels, alike on all ranks."""
    inputs = torch.randn(count, 8)
    return TensorDataset(inputs, _labels(inputs))


def loader() -> DataLoader[Any]:
    """Ten batches of 16 such samples for each of two ranks. The audit can enlarge these batches, but not those of `batches()`."""
    data = samples(320)
    return DataLoader(data, 16, sampler=DistributedSampler[Any](data, shuffle=False))


def _labels(inputs: Tensor) -> Tensor:
    return (inputs.sum(1) > 0).long()


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[Sequence[Tensor]]) -> None:
    """Train on batches of inputs and labels, for exhibits whose bug is somewhere else."""
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def spread(model: nn.Module) -> float:
    """The largest difference of any weight between two ranks. A collective."""
    return spread_of(nn.utils.parameters_to_vector(model.parameters()).detach())


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


def gathered(values: Iterable[Any]) -> list[Any]:
    """The values of all ranks in one list, rank after rank. A collective."""
    parts: list[list[Any]] = [[]] * dist.get_world_size()
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
