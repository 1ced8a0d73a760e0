"""Sparse gradients, of embeddings with ``sparse=True``: they are in no bucket, but each is summed as it is.

gloo gathers the indices and values of all ranks and adds them up (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), so what
travels grows with the number of ranks and of rows that they use, not with the size of the embedding.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.by_hand.drop_in.reducer import UnbucketedAverage


def sparse_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters that will have sparse gradients."""
    return {
        f"{prefix}.weight".removeprefix(".")
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }


class SparseAverage(UnbucketedAverage):
    """Averages sparse gradients when backward is over."""

    def average(self) -> None:
        for parameter in self.parameters:
            gradient = _no_rows_of(parameter) if parameter.grad is None else parameter.grad
            total = gradient / self.reducer.div_factor
            dist.all_reduce(total, group=self.group)
            if parameter.grad is not None or total._nnz():  # else no rank has used it
                parameter.grad = total


def _no_rows_of(parameter: Tensor) -> Tensor:
    """A sparse gradient without any row, of the form that an embedding's has: gloo sums tensors of one form alone."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape)
