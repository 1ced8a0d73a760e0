"""Which tests see GPUs: those that are marked ``gpu``, whatever ran before them. All others mean the CPU, also on a machine with
GPUs: with CUDA there, gloo's tests would train on it, and a group of one would start NCCL in the tests' own process.

The hook is around a whole test, fixtures included: those of its module are set up before any fixture of the test itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import pytest
import torch

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}


@contextlib.contextmanager
def hidden_gpus() -> Iterator[None]:
    """Within the block, neither this process nor those that it starts see a CUDA device.

    CUDA reads its variable once per process, and torch remembers the number of devices once it has used one. So the variable
    is for the processes that are started. Here, what everybody asks for devices answers that there is none.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_GPUS.items():
            patch.setenv(name, value)
        for module in (torch.cuda, torch.accelerator):
            patch.setattr(module, "is_available", lambda: False)
            patch.setattr(module, "device_count", lambda: 0)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with contextlib.nullcontext() if item.get_closest_marker("gpu") else hidden_gpus():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
