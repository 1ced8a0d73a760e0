"""Functions of torch, replaced by ones that call them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

COUNT = int(os.environ.get("STAND_IN_GPUS", "1"))  # as many as there are ranks
CPU = torch.device("cpu")
Substitute = Callable[..., Any]


def replace(owner: Any, *names: str) -> Callable[[Substitute], Substitute]:
    """Let the decorated function take the place of these functions of an owner, where this version of torch has them.

    It is called with the original and its arguments.
    """

    def decorate(substitute: Substitute) -> Substitute:
        for name in names:
            original = getattr(owner, name, None)
            if original is not None:
                setattr(owner, name, _replaced(original, substitute))
        return substitute

    return decorate


def _replaced(original: Callable[..., Any], substitute: Substitute) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return substitute(original, *args, **kwargs)

    # HACK: torch.jit.script knows torch's functions by their identity.
    builtin = torch.jit._builtins._find_builtin(original)
    if builtin is not None:
        torch.jit._builtins._register_builtin(replaced, builtin)
    return replaced


def is_gpu(device: Any) -> bool:
    """Whether an argument names a GPU: ``"cuda:1"``, a ``torch.device``, or a number."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def without_gpu(device: Any) -> Any:
    """The device, or the CPU in the place of a GPU."""
    return CPU if is_gpu(device) else device


def called_by_torch() -> bool:
    """Whether torch itself calls the replaced function, and not the script or another library."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__package__") == __package__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "torch"


@functools.cache
def say(text: str) -> None:
    """Say something once, on one rank."""
    if os.environ.get("RANK", "0") == "0":
        print(f"stand-in GPU: {text}", file=sys.stderr, flush=True)
