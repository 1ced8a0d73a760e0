"""`torch.autograd.grad` before the first backward pass

A gradient penalty differentiates the output with respect to the input, then the loss with respect to the weights. The
gradient of the loss is 1 + 2 on rank 0 and 3 + 2 on rank 1, 4 on average. torch averages nothing, in this step and all that
follow. Why: the first backward pass that `_DDPSink` sees is the one for the input. It averages then, when there is nothing,
and never again (`_static_graph_delay_allreduce_enqueued`).

With torch's: `static_graph=False`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ddp.conformance.differences.program import grad, line, main, x


def case(DDP: Any) -> Iterator[str]:
    network = line()
    model = DDP(network, static_graph=True)
    for step in range(2):
        network.zero_grad()
        inputs = x().requires_grad_()
        output = model(inputs)
        (slope,) = torch.autograd.grad(output, inputs, create_graph=True)
        (output + slope**2).sum().backward()
        yield f"step {step}: {grad(network.weight)}"


if __name__ == "__main__":
    main(case)
