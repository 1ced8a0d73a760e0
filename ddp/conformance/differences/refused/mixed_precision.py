"""`mixed_precision` on a CPU

torch built for CUDA cannot make the wrapper where there is no GPU. The module is left with buffers in `buffer_dtype`, even
those that count in integers. Why: `__init__` makes a `torch.Stream()`, which is one of the accelerator that torch was built
for. Before that, `_cast_buffers` has converted every buffer.

With torch's: `torch.autocast("cpu", torch.bfloat16)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from ddp.conformance.differences.program import line, main, shown, x


def case(DDP: Any) -> Iterator[str]:
    network = nn.Sequential(line(), nn.BatchNorm1d(1))
    config = _MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    try:
        model = DDP(network, mixed_precision=config)
        model(torch.cat([x(), 2 * x()])).sum().backward()
        yield f"the gradient's dtype: {next(network.parameters()).grad.dtype}"  # type: ignore[union-attr]
    except Exception as error:
        yield shown(error)
    yield f"num_batches_tracked: {network.get_buffer('1.num_batches_tracked').dtype}"


if __name__ == "__main__":
    main(case)
