"""A communication hook that looks at gradients of channels-last weights

`bucket.gradients()` are meant to be the gradients in the bucket, one per parameter. Of a weight in channels-last format, torch's has
the right numbers in the wrong places: the bucket holds them in the weight's order of memory, and the view reads them in
the order of its shape. So an optimizer that a hook runs (`model._register_fused_optim`) takes a wrong step. Why:
`GradBucket::getGradients` views each piece by its sizes alone.

With torch's: use `parameter.grad`'s strides, `torch.as_strided(gradient, parameter.shape, parameter.stride())`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp.conformance.differences.program import main


def case(DDP: Any) -> Iterator[str]:
    seen = []

    def hook(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        seen.append([gradient.flatten().tolist() for gradient in bucket.gradients()])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    network = nn.Conv2d(2, 1, (1, 2), bias=False).to(memory_format=torch.channels_last)
    model = DDP(network)
    model.register_comm_hook(None, lambda _, bucket: hook(bucket))
    model(torch.arange(4.0).view(1, 2, 1, 2)).sum().backward()
    yield f"the gradient is 0, 1, 2, 3; the hook sees {seen[0][0]}"


if __name__ == "__main__":
    main(case)
