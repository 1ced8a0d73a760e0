"""Communication hooks that are not plain functions

A `functools.partial`, a function whose second argument has another name, and one whose annotations are strings, as all are
below `from __future__ import annotations`. Why: `_check_comm_hook` asks for `hook.__name__`, for
`signature.parameters["bucket"]`, and for the very class as its annotation.

With torch's: `lambda state, bucket: hook(state, bucket)`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp.conformance.differences.program import grad, line, main, shown, x


def annotated(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    return allreduce_hook(state, bucket)


def case(DDP: Any) -> Iterator[str]:
    hooks = {
        "partial": functools.partial(allreduce_hook),
        "another name": lambda state, gradients: allreduce_hook(state, gradients),
        "annotated": annotated,
    }
    for name, hook in hooks.items():
        network = line()
        model = DDP(network)
        try:
            model.register_comm_hook(None, hook)
            model(x()).backward()
            yield f"{name}: {grad(network.weight)}"
        except Exception as error:
            yield f"{name}: {shown(error)}"


if __name__ == "__main__":
    main(case)
