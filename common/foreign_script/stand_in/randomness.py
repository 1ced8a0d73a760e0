"""The random generator of the stand-in, beside the CPU's: a script may seed them unlike, on each rank or on all alike.

What is made on the stand-in is drawn from it, and what a module with parameters there draws in its forward pass.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .replacing import replace
from .tensors import is_moved


class _Drawing(threading.local):
    """Whether this thread draws from the stand-in's generator."""

    now = False


_drawing = _Drawing()


def _new_state(number: int | None = None) -> Tensor:
    """The state of a generator with this seed; without one, at random, as torch seeds those of GPUs."""
    generator = torch.Generator()
    if number is None:
        generator.seed()
    else:
        generator.manual_seed(int(number))
    return generator.get_state()


_state = _new_state()  # of the stand-in's generator, unless it is drawn from


def get_state(device: Any = None) -> Tensor:
    """The state of the stand-in's generator."""
    return torch.default_generator.get_state() if _drawing.now else _state.clone()


def set_state(state: Tensor, device: Any = None) -> None:
    """As ``torch.cuda.set_rng_state``."""
    global _state
    if _drawing.now:
        torch.default_generator.set_state(state)
    else:
        _state = state.clone()


def seed(number: int | None = None) -> None:
    """As ``torch.cuda.manual_seed``, which ``torch.manual_seed`` calls, too; without a number, as ``torch.cuda.seed``."""
    set_state(_new_state(number))


@contextlib.contextmanager
def drawn_on_gpu() -> Iterator[None]:
    """A block that draws from the stand-in's generator. In a backward pass it does not: checkpoints draw again what forward drew."""
    global _state
    if _drawing.now or torch._C._current_graph_task_id() != -1:
        yield
        return
    on_cpu = torch.default_generator.get_state()
    torch.default_generator.set_state(_state)
    _drawing.now = True
    try:
        yield
    finally:
        _drawing.now = False
        _state = torch.default_generator.get_state()
        torch.default_generator.set_state(on_cpu)


@replace(nn.Module, "__call__")
def call(original: Any, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if _drawing.now or not is_moved(next(self.parameters(), None)):
        return original(self, *args, **kwargs)
    with drawn_on_gpu():
        return original(self, *args, **kwargs)
