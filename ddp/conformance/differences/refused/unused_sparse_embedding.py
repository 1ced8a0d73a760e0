"""`find_unused_parameters` with a sparse embedding that one rank does not use

Rank 1 raises and rank 0 waits. Why: `Reducer::mark_variable_ready_sparse` takes no missing gradient, while
`mark_variable_ready_dense` takes zeros. Issue #80496.

With torch's: let every rank use each sparse embedding, if only by `0 * embedding(index).sum()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.differences.program import hang_for_two_seconds, line, main, x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.embedding = line(), nn.Embedding(3, 1, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x)
        return y + self.embedding(torch.tensor([0])) if dist.get_rank() == 0 else y


def case(DDP: Any) -> Iterator[str]:
    network = Model()
    model = DDP(network, find_unused_parameters=True)
    hang_for_two_seconds()
    model(x()).backward()
    assert network.embedding.weight.grad is not None
    yield f"gradient: {network.embedding.weight.grad.to_dense().flatten().tolist()}"


if __name__ == "__main__":
    main(case)
