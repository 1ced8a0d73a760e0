"""A rank whose layer is wider

Rank 1 is told of the difference, and rank 0 waits. With more ranks, the others wait too, or go on: each compares its shapes with
rank 0's alone. Why: `_verify_param_shape_across_processes` broadcasts rank 0's shapes, and an error on one rank reaches no other.

With torch's: let all ranks build the model from the same settings. torchrun ends the others when a rank fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp.conformance.differences.program import hang_for_two_seconds, main


def case(DDP: Any) -> Iterator[str]:
    hang_for_two_seconds()
    DDP(nn.Linear(1, 1 + dist.get_rank()))
    yield "accepted"


if __name__ == "__main__":
    main(case)
