"""What a forward pass writes beside its output, undone: to buffers, and to the attributes of modules.

A step that is skipped must leave no trace in BatchNorm's statistics, and the warm-up pass before the first step none at all.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class SavedBuffers:
    """A copy of a network's buffers. A forward pass may write to a buffer, or assign another tensor to its name.

    :meth:`restore` puts the tensor that was there back, with its values.
    """

    def __init__(self, network: nn.Module) -> None:
        self._places = [(module._buffers, name) for module in network.modules() for name in module._buffers]

    @torch.no_grad()
    def save(self) -> None:
        """Before the forward passes."""
        self._buffers = [place[name] for place, name in self._places]
        buffers = [buffer for buffer in self._buffers if buffer is not None]
        dtypes = {buffer.dtype for buffer in buffers}
        self._groups = [[buffer for buffer in buffers if buffer.dtype == dtype] for dtype in dtypes]
        self._saved = [_flat(group) for group in self._groups]

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
        for group, saved in zip(self._groups, self._saved, strict=True):
            flat = saved if where is None else torch.where(where, saved, _flat(group))
            parts = flat.split([buffer.numel() for buffer in group])
            torch._foreach_copy_(group, [part.view(buffer.shape) for part, buffer in zip(parts, group, strict=True)])


def _flat(buffers: list[Tensor]) -> Tensor:
    """The values of buffers of one dtype, in one piece: a GPU copies it, and chooses between two, by few kernels."""
    return torch.cat([buffer.reshape(-1) for buffer in buffers])


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
