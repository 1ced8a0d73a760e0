"""Sparse gradients, of embeddings with ``sparse=True``: they are in no bucket, but each is summed as it is.

gloo gathers the indices and values of all ranks and adds them up (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp), so what
travels grows with the number of ranks and of rows that they use, not with the size of the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp.by_hand import errors
from ddp.by_hand.drop_in.reducer import DropInReducer


def sparse_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters that will have sparse gradients."""
    embeddings = {
        prefix: part
        for prefix, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    }
    return {f"{prefix}.weight".removeprefix(".") for prefix in embeddings}


class SparseAverage:
    """Averages sparse gradients when backward is over.

    :param parameters: in the same order on all ranks
    :param reducer: knows when a backward pass synchronizes
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, reducer: DropInReducer
    ) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._group, self._reducer = group, reducer
        self._nodes = [get_gradient_edge(parameter).node for parameter in self._parameters]
        self.hooks = [node.register_hook(self._ready) for node in self._nodes]
        reducer.ids.update(map(id, self._parameters))
        reducer.after_backward.append(self._average)

    def _ready(self, *_: object) -> None:
        if self._reducer.expecting:
            self._reducer.begin()
            self._reducer.others_ready = True

    @torch.no_grad()
    def _average(self) -> None:
        if error := errors.converted(self._names, self._parameters, self._nodes):
            raise error
        for parameter in self._parameters:
            gradient = _no_rows_of(parameter) if parameter.grad is None else parameter.grad
            total = gradient / self._reducer.div_factor
            dist.all_reduce(total, group=self._group)
            if parameter.grad is not None or total._nnz():  # else no rank has used it
                parameter.grad = total


def _no_rows_of(parameter: Tensor) -> Tensor:
    """A sparse gradient without any row, of the form that an embedding's has: gloo sums tensors of one form alone."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, parameter.new_empty((0, *parameter.shape[1:])), parameter.shape)
