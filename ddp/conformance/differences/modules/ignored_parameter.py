"""A parameter of the outermost module that is to be ignored

`_set_params_and_buffers_to_ignore_for_model` leaves a parameter to each rank. torch averages the gradient of `scale` all the
same, though it does not broadcast its value. Why: `_build_params_for_reducer` makes names as
`f"{module_name}.{param_name}"`, which is `.scale` in the outermost module, and looks for that among the names.

With torch's: ignore both names, `["scale", ".scale"]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ddp.conformance.differences.program import grad, line, main, x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale = line(), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.scale  # type: ignore[no-any-return]


def case(DDP: Any) -> Iterator[str]:
    network = Scaled()
    DDP._set_params_and_buffers_to_ignore_for_model(network, ["scale"])
    model = DDP(network)
    model(x()).backward()
    yield f"scale: {grad(network.scale)}, line: {grad(network.line.weight)}"


if __name__ == "__main__":
    main(case)
