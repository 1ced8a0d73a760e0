"""`load_state_dict(..., assign=True)` after wrapping

Nothing is averaged any more: the hooks sit on the parameters that were wrapped, which the module does not use now. Assigning
`network.weight = nn.Parameter(...)` does the same.

With torch's: load before wrapping, or without `assign`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network)
    network.load_state_dict({"weight": torch.ones(1, 1)}, assign=True)
    model(x()).backward()
    yield f"gradient: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
