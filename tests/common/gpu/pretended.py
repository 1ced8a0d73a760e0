"""GPUs and NCCL where there are none: a rank finds devices, and gloo stands in for what torch would build."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

CREATORS = {"_create_nccl_process_group": "ProcessGroupNCCL", "_create_nccl2_process_group": "ProcessGroupNCCL2"}
# Before, the name "nccl" was not looked up among registered functions.
registered = pytest.mark.skipif(
    not all(hasattr(distributed_c10d, name) for name in CREATORS), reason="this torch has one implementation of NCCL"
)


@contextlib.contextmanager
def pretended_gpus(uuids: list[str]) -> Iterator[list[str]]:
    """Within the block this process sees GPUs of these names; yields what is built under the name "nccl" from then on."""
    built: list[str] = []

    def creator(name: str) -> Callable[[Any, Any], Any]:
        def create(options: Any, _: Any) -> Any:
            built.append(name)
            where = options.store, options.group_rank, options.group_size
            return dist.ProcessGroupGloo(*where, timeout=options.timeout)

        return create

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="NVIDIA H100", uuid=uuids[device.index])

    with contextlib.ExitStack() as stack:
        for function, name in CREATORS.items():
            stack.enter_context(mock.patch.object(distributed_c10d, function, creator(name)))
        for function, replacement in {
            "is_available": lambda: True,
            "device_count": lambda: len(uuids),
            "set_device": lambda device: None,
            "get_device_properties": properties,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, function, replacement))
        yield built
