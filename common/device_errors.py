"""Errors of a device as one line with advice: memory that ran out, and operations that have no deterministic algorithm.

torch says how many bytes it could not have. It does not say what uses the others, and which flags need less.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from common.errors import UsageError, one_line

TORCH = f"{Path(torch.__file__).parent}/"
# CUDA's allocator, the CPU's, cuBLAS and cuDNN, NCCL.
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|STATUS_ALLOC_FAILED")
MUCH = 1e9  # bytes: less than this is not worth a word
SETTING = "expandable_segments:True"


@contextlib.contextmanager
def device_errors(device: torch.device, less_memory: Sequence[str]) -> Iterator[None]:
    """A block that computes on a device.

    :param less_memory: flags that need less memory, for the text of the error
    :raises UsageError: in place of an error that :func:`explain` knows; other errors pass unchanged
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise_explained(error, device, less_memory)
        raise


def raise_explained(error: Exception, device: torch.device, less_memory: Sequence[str]) -> None:
    """:raises UsageError: in place of an error that :func:`explain` knows"""
    if (explanation := explain(error, device, less_memory)) is not None:
        line = UsageError(explanation)
        line.about = f"{type(error).__name__} on a device"  # all ranks may run out of memory, with other numbers
        raise line from error


def explain(error: Exception, device: torch.device, less_memory: Sequence[str]) -> str | None:
    """The line for an error; None for an error of another kind."""
    text = str(error)
    if operation := re.match(r"(\S+) does not have a deterministic implementation", text):
        return f"--deterministic: {operation[1]} has no deterministic algorithm on {device.type}: leave the flag out"
    if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or OUT_OF_MEMORY.search(text)):
        return None
    named = text if text.startswith("out of memory: ") else f"out of memory{_place(error)}{_asked(text)}"
    of_host = isinstance(error, MemoryError) or "CPUAllocator" in text
    usage = [] if of_host or device.type == "cpu" else _memory_usage(device)
    return f"{one_line('; '.join([named, *usage]))}: try {' or '.join(less_memory)}"


def _place(error: Exception) -> str:
    """The last function that is not torch's."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(TORCH)]
    if not frames[1:]:  # the first is this block's own
        return ""
    file = Path(frames[-1].filename)
    return f" in {frames[-1].name} ({file.parent.name}/{file.name}:{frames[-1].lineno})"


def _asked(text: str) -> str:
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
    return f", which asked for {asked[1]}" if asked else ""


def _memory_usage(device: torch.device) -> list[str]:
    """The uses of a GPU's memory. The tensors of the call that failed are still there: the error refers to them."""
    free, total = torch.cuda.mem_get_info(device)
    tensors, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    parameters = [p for p in gc.get_objects() if type(p) is nn.Parameter and p.device == device]
    of_model = sum(part.nbytes for p in parameters for part in (p, p.grad) if part is not None)
    facts = [
        f"{torch.cuda.get_device_name(device)} has {_gb(total)}, of which tensors took {_gb(tensors)}, {_gb(of_model)} of "
        "them for weights and gradients"
    ]
    if (others := total - free - reserved) > MUCH:
        facts.append(f"{_gb(others)} are not this process's tensors (see nvidia-smi)")
    if (scattered := reserved - tensors) > MUCH and SETTING not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        facts.append(f"{_gb(scattered)} are free, in pieces: PYTORCH_ALLOC_CONF={SETTING} joins them")
    return facts


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"
