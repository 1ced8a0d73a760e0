"""A rank whose parameters have another dtype

Rank 1 has converted its module to float64. Rank 0 sends weights of 0.1 in float32, and rank 1 takes their bits for a
float64. Why: `_verify_param_shape_across_processes` compares no dtypes, and gloo takes fewer bytes than it waits for.

With torch's: compare the parameters' dtypes over the ranks before wrapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp.conformance.differences.program import main


def case(DDP: Any) -> Iterator[str]:
    network = nn.utils.skip_init(nn.Linear, 1, 2, bias=False)
    nn.init.constant_(network.weight, 0.1)
    if dist.get_rank() == 1:
        network = network.double()
    DDP(network)
    yield "weights: " + ", ".join(f"{weight:.3g}" for weight in network.weight.flatten().tolist())


if __name__ == "__main__":
    main(case)
