"""A rank with a larger buffer

Rank 0 sends two elements, and rank 1 has three: the third stays what it was, and the ranks differ. (The other way round,
gloo aborts the process of rank 1.) Why: `_verify_param_shape_across_processes` is given the parameters, not the buffers.

With torch's: compare the buffers' shapes over the ranks before wrapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddp.conformance.differences.program import line, main


def case(DDP: Any) -> Iterator[str]:
    network = line()
    network.register_buffer("numbers", torch.full((2 + dist.get_rank(),), 1.0 + dist.get_rank()))
    DDP(network)
    yield f"numbers: {network.get_buffer('numbers').tolist()}"


if __name__ == "__main__":
    main(case)
