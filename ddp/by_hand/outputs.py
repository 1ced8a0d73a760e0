"""The tensors in what a module returns, which may be any structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses, however nested."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in(vars(leaf))
