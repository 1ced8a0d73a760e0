"""Ranks with the same parameters in another order

torch averages the gradient of `a` on rank 0 with that of `b` on rank 1, and broadcasts weights likewise. The gradient of `a`
should be 2 and that of `b` 20. It happens where a module is built from a `set`, or from files in the order in which a disk
lists them. Why: `_verify_param_shape_across_processes` compares shapes alone.

With torch's: compare `[name for name, _ in module.named_parameters()]` over the ranks (`all_gather_object`) before wrapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp.conformance.differences.program import grad, line, main, x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("ab", "ba")[dist.get_rank()]:
            self.add_module(name, line())

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("a")(x) + 10 * self.get_submodule("b")(x)  # type: ignore[no-any-return]


def case(DDP: Any) -> Iterator[str]:
    network = Model()
    model = DDP(network)
    model(x()).backward()
    for name, parameter in sorted(network.named_parameters()):
        yield f"{name}: {grad(parameter)}"


if __name__ == "__main__":
    main(case)
