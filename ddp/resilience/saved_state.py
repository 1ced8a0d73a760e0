"""What a forward pass changes in a network beside its gradients, and how that is undone."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class SavedBuffers:
    """A copy of a network's buffers, to undo what the forward passes of a skipped step do to BatchNorm's statistics and the like.

    A forward pass may write to a buffer, or assign another tensor to its name. :meth:`restore` puts the tensor that was there
    back, with its values.
    """

    def __init__(self, network: nn.Module) -> None:
        self._places = [(module._buffers, name) for module in network.modules() for name in module._buffers]
        self._buffers: list[Tensor | None] = []
        self._groups: list[_SavedGroup] = []

    @torch.no_grad()
    def save(self) -> None:
        """Before the forward passes."""
        buffers = [place[name] for place, name in self._places]
        if len(buffers) != len(self._buffers) or any(a is not b for a, b in zip(buffers, self._buffers, strict=True)):
            self._buffers = buffers
            by_dtype = sorted(
                (buffer for buffer in buffers if buffer is not None), key=lambda buffer: str(buffer.dtype)
            )
            of_one_dtype = [list(same) for _, same in itertools.groupby(by_dtype, key=lambda buffer: buffer.dtype)]
            self._groups = [_SavedGroup(same) for same in of_one_dtype]
        for group in self._groups:
            torch._foreach_copy_(group.saved, group.buffers)

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """After the step.

        :param where: bool 0-d, on the device: whether to restore; always when None. The host need not know it, unless a forward
            pass assigned a buffer of another shape
        """
        for (place, name), buffer in zip(self._places, self._buffers, strict=True):
            now = place[name]
            if now is buffer:
                continue
            if where is not None and now is not None and buffer is not None and now.shape == buffer.shape:
                buffer.copy_(now)  # the choice comes below
            elif where is not None and not where:
                continue
            place[name] = buffer
        for group in self._groups:
            saved = group.saved if where is None else group.chosen(where)
            torch._foreach_copy_(group.buffers, saved)


class _SavedGroup:
    """Buffers of one dtype, and the memory into which they are saved: in one piece, for a GPU to choose by few kernels."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers = buffers
        self._flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        self.saved = self._split(self._flat)

    def chosen(self, where: Tensor) -> list[Tensor]:
        """The saved values if ``where`` is true, else the present ones."""
        now = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        return self._split(torch.where(where, self._flat, now))

    def _split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([buffer.numel() for buffer in self.buffers])
        return [part.view(buffer.shape) for part, buffer in zip(parts, self.buffers, strict=True)]


@contextlib.contextmanager
def unchanged_attributes(network: nn.Module) -> Iterator[None]:
    """A block after which the modules' own attributes are what they were before it: numbers, and the content of lists, dicts and sets.

    A forward pass may count in Python. (Parameters, buffers and submodules are not touched.)
    """
    torch_s_own = vars(nn.Module()).keys()
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in network.modules():
        own = {name: value for name, value in vars(module).items() if name not in torch_s_own}
        before.append((vars(module), own))
    contents = [
        (value, copy.copy(value)) for _, own in before for value in own.values() if type(value) in (list, dict, set)
    ]
    try:
        yield
    finally:
        for attributes, own in before:
            for name in attributes.keys() - torch_s_own - own.keys():
                del attributes[name]
            attributes.update(own)
        for value, content in contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
