"""A fused optimizer and channels-last weights

`_register_fused_optim` lets an optimizer update each parameter in the communication hook, from `bucket.gradients()`. Of a weight in
channels-last format these have the right numbers in the wrong places: the bucket holds them in the weight's order of memory, and
each piece is viewed by its sizes alone (`GradBucket::getGradients`). So the optimizer takes a wrong step, without a word.

With torch's: call the optimizer after backward, with `parameter.grad`, which is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ddp.conformance.differences.program import main


def case(DDP: Any) -> Iterator[str]:
    network = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
    nn.init.zeros_(network.weight)
    model = DDP(network)
    model._register_fused_optim(torch.optim.SGD, lr=1.0)
    model(torch.arange(4.0).view(1, 2, 1, 2)).sum().backward()
    yield f"the gradient is 0, 1, 2, 3; after a step with a rate of 1, 0 became {network.weight.flatten().tolist()}"


if __name__ == "__main__":
    main(case)
