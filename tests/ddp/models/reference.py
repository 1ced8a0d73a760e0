"""Data parallelism emulated in one process by plain torch: a replica for each rank, nothing sent, nothing of the product imported.

Each replica does forward and backward passes on its rank's samples. Then every replica gets the mean of all gradients, and an
optimizer of its own, torch's, that works tensor by tensor. A strided parameter has been made contiguous before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Batch = tuple[Tensor, Tensor]


class Replicas:
    """All ranks' replicas of one network.

    :param build: the network as rank 0 builds it
    :param ranks: how many replicas; one, if the ranks' batches are normalized together
    """

    def __init__(self, build: Callable[[], nn.Module], ranks: int, optimizer: Optimizer) -> None:
        self.networks = [build() for _ in range(ranks)]
        for replica in self.networks:
            copies: dict[int, Tensor] = {}  # where the memory begins; parameters may share it
            for parameter in replica.parameters():
                if not torch.ops.aten.is_non_overlapping_and_dense(parameter):
                    parameter.data = copies.setdefault(parameter.data_ptr(), parameter.data.contiguous())
        self.optimizers = [optimizer(replica.parameters()) for replica in self.networks]

    def add_gradients(self, batches: list[Batch], weight: float = 1.0) -> list[float]:
        """Each replica's backward pass on its batch; returns the losses."""
        losses = []
        for replica, (images, labels) in zip(self.networks, batches, strict=True):
            loss = F.cross_entropy(replica(images).float(), labels)
            (loss * weight).backward()
            losses.append(loss.item())
        return losses

    def average(self) -> None:
        """Give each replica the mean of the gradients."""
        for same in zip(*(replica.parameters() for replica in self.networks), strict=True):
            gradients = [parameter.grad.to_dense() for parameter in same if parameter.grad is not None]
            if gradients:
                assert len(gradients) == len(same)
                mean = torch.stack([gradient / len(same) for gradient in gradients]).sum(0)
                for parameter in same:
                    parameter.grad = mean.clone()

    def clip(self, most: float) -> list[float]:
        """Clip each replica's gradients; returns the norms."""
        norms = []
        for replica in self.networks:
            gradients = [parameter.grad for parameter in replica.parameters() if parameter.grad is not None]
            norm = sum((gradient.abs().double() ** 2).sum().item() for gradient in gradients) ** 0.5
            for gradient in gradients:
                gradient.mul_(min(1.0, most / (norm + 1e-6)))
            norms.append(norm)
        return norms

    def update(self, skip: bool = False) -> None:
        """The optimizers' steps, unless they are skipped; the gradients go."""
        for optimizer in self.optimizers:
            if not skip:
                optimizer.step()
            optimizer.zero_grad()

    def give_buffers_of_rank_0(self) -> None:
        for other in self.networks[1:]:
            for mine, theirs in zip(other.buffers(), self.networks[0].buffers(), strict=True):
                mine.data = theirs.clone()

    def end_epoch(self) -> None:
        """BatchNorm's running statistics become their mean, all other buffers rank 0's."""
        means = {}
        for name, layer in self.networks[0].named_modules():
            for kind in ("running_mean", "running_var") if isinstance(layer, _BatchNorm) else ():
                statistics = [getattr(replica.get_submodule(name), kind) for replica in self.networks]
                if statistics[0] is not None:
                    means[f"{name}.{kind}"] = torch.stack(statistics).mean(0)
        self.give_buffers_of_rank_0()
        for replica in self.networks:
            for name, buffer in replica.named_buffers():
                if name in means:
                    buffer.copy_(means[name])


def train_epoch(replicas: Replicas, batches: list[list[Batch]], accumulation: int, clip: float | None) -> float:
    """One pass over all ranks' micro-batches; returns the mean loss of the steps that are finite. The others change nothing.

    :param batches: a list for each replica
    """
    accepted = []
    for step in range(0, len(batches[0]), accumulation):
        before = [{name: buffer.clone() for name, buffer in one.named_buffers()} for one in replicas.networks]
        losses: list[float] = []
        for micro_step in range(step, step + accumulation):
            losses += replicas.add_gradients([own[micro_step] for own in batches], 1 / accumulation)
        is_finite = bool(torch.tensor(losses).isfinite().all())
        replicas.average()
        if clip is not None:
            replicas.clip(clip)
        replicas.update(skip=not is_finite)
        if is_finite:
            accepted += losses
        else:
            for replica, buffers in zip(replicas.networks, before, strict=True):
                for name, buffer in replica.named_buffers():
                    buffer.data = buffers[name]
    replicas.end_epoch()
    return sum(accepted) / max(1, len(accepted))


@torch.no_grad()
def evaluate(network: nn.Module, batches: Iterator[Batch] | list[Batch]) -> Tensor:
    """Mean loss of the batches, in evaluation mode; the network trains on."""
    network.eval()
    losses = [F.cross_entropy(network(images).float(), labels) for images, labels in batches]
    network.train()
    return torch.stack(losses).mean()
