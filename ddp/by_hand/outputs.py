"""The tensors in what a module returns, which may be any structure, and the parameters that they depend on."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves


def tensors_in(output: Any, within: tuple[object, ...] = ()) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and dataclasses, however nested.

    :param within: the dataclasses around it. They are skipped inside themselves, or a cycle would never end.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not any(leaf is one for one in within):
            fields = [getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)]
            yield from tensors_in(fields, (*within, leaf))


def depend_on(nodes: Iterable[Node | None], parameters: Container[int]) -> bool:
    """Whether a backward pass from these nodes of the graph can reach any of the parameters.

    :param parameters: the ``id`` of each
    """
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in parameters:
            return True
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return False
