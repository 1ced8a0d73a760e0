"""ddp/sharded/out_of_memory.py: too little memory for a unit, by a limit of the process, is an error that names the unit."""

from __future__ import annotations

import contextlib
import gc
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.distributed.process_group import process_group
from ddp.all_reduce.backend import Backend
from ddp.sharded import shard
from ddp.sharded.flat import FlatParameters
from ddp.sharded.out_of_memory import memory_for
from ddp.sharded.zero3 import ZeRO3
from tests.support.launch import run_ranks

WIDTH = 4_224
# Bytes above 64 MiB, so that malloc maps and unmaps each by itself: where no memory can be mapped, it looks into the heaps of other
# threads, which have so much address space.
UNIT = 4 * WIDTH * WIDTH


@contextlib.contextmanager
def memory(more: float) -> Iterator[None]:
    """Within this block, the process can get memory for so many units more."""
    size = re.search(r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert size is not None
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(size[1]) + int(more * UNIT), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def network() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def message_of(error: pytest.ExceptionInfo[RuntimeError]) -> str:
    assert "tried to allocate" in str(error.value.__cause__), error.value
    return str(error.value)


def limit(flat: FlatParameters, method: str, units: float) -> None:
    """Let a method of a unit have memory for so many units only."""
    original = getattr(flat, method)

    def within_limit(*arguments: Any, **more: Any) -> Any:
        with memory(units):
            return original(*arguments, **more)

    setattr(flat, method, within_limit)


def limited() -> dict[str, str]:
    """The messages when memory runs out at construction, in a gather, and for a gradient."""
    messages = {}
    inputs = torch.ones(1, WIDTH)
    with process_group(timeout_s=60):
        shard(nn.Linear(8, 8, device="meta"), 3)  # what torch imports at the first use takes memory, too
        collectives = Backend(), Backend()
        with memory(0.5), pytest.raises(RuntimeError) as error:
            ZeRO3(network(), None, collectives)
        messages["construction"] = message_of(error)
        del error
        for name, stage, unit, method, units in (
            ("gather", 3, 1, "start_gather", 0.5),
            ("gradient", 2, 2, "add_gradient", 0.5),
        ):
            model = shard(network(), stage)
            model(inputs).sum().backward()  # a pass with enough memory: threads and connections have theirs
            limit(model.flats[unit], method, units)
            with pytest.raises(RuntimeError) as error:
                model(inputs).sum().backward()
            messages[name] = message_of(error)
            del error, model  # else they are freed within the next limit, which then has more memory
            gc.collect()
    return messages


@pytest.mark.examples
def test_too_little_memory_names_the_unit_and_what_it_needs() -> None:
    """Too little memory names the unit and what it needs.

    Claim (ddp/sharded/README.md, 5): too little memory names the unit and what it needs.
    """
    for messages in run_ranks(limited, 2, fresh=True):
        units = {name: re.findall(r"the unit (\d) needs ([\d,]+) bytes", message) for name, message in messages.items()}
        whole = f"{UNIT:,}"
        assert units == {
            "construction": [("0", whole)],
            "gather": [("1", whole)],
            "gradient": [("2", whole)],
        }
        assert all("Make units smaller" in message for message in messages.values())


def test_only_a_lack_of_memory_is_explained() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match=r"the root \(what lies in no unit\) needs 1,024 bytes"),
        memory_for("", 1024),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2$"), memory_for("blocks.0", 8):
        raise RuntimeError("mat1 and mat2")
