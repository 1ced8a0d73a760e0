"""The messages of a rank, and their times: a record of all operators that run in a block, with torch.distributed's collectives among them.

with Recorder() as record:
    model(inputs()).sum().backward()
record.messages  # [Message(operator="c10d.allreduce_", bytes=116, dtypes={torch.float32}, at=17)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Message:
    """A collective, or a send.

    :param bytes: that this rank contributes
    :param dtypes: of what it contributes
    :param at: its place among all operators
    """

    operator: str
    bytes: int
    dtypes: frozenset[torch.dtype]
    at: int

    @property
    def floating(self) -> bool:
        """Whether it may carry gradients; flags and indices are integers."""
        return any(dtype.is_floating_point for dtype in self.dtypes)


class Recorder(TorchDispatchMode):
    """A block whose operators are recorded: all of this thread's, in forward and backward.

    :ivar operators: their names, in order
    :ivar messages: those that send something
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []
        self.messages: list[Message] = []

    @property
    def gradients(self) -> list[Message]:
        """The messages that may carry gradients."""
        return [message for message in self.messages if message.floating]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.namespace, func._schema.name.rpartition("::")[2]
        if namespace in ("c10d", "_c10d_functional") and not any(word in name for word in ("recv", "wait", "barrier")):
            tensors = _contributed(func, args)
            dtypes = frozenset(tensor.dtype for tensor in tensors)
            size = sum(tensor.nbytes for tensor in tensors)
            self.messages.append(Message(f"{namespace}.{name}", size, dtypes, len(self.operators)))
        self.operators.append(f"{namespace}.{name}")
        return func(*args, **(kwargs or {}))


def _contributed(func: Any, args: Any) -> list[Tensor]:
    """The tensors that go out: those called inputs, or all if none is called so."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    inputs = [value for name, value in named.items() if name.startswith("input")]
    return [leaf for leaf in tree_leaves(inputs or list(named.values())) if isinstance(leaf, Tensor)]
