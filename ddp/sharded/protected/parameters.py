"""Parameters that notice what users do to them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp.sharded.zero3 import in_backward


class WatchedParameter(nn.Parameter):
    """A parameter whose ``_version`` counts every write, also those through ``.data``, which plain ones do not count."""

    # HACK: it replaces a property of torch's. Without it, writes through ``.data`` would be overlooked: test_user_code.py fails.
    data = property(Tensor.detach, Tensor.data.__set__)  # type: ignore[attr-defined]


def _gradient(parameter: WholeParameter) -> Tensor | None:
    # HACK: Module._apply, which converts a module, reads gradients, so it may. If it changes a parameter, the next forward pass
    # raises. If torch renames it, every conversion raises the error below.
    if not in_backward() and sys._getframe(1).f_code.co_name != "_apply":
        raise RuntimeError(
            "the module's own parameters have no gradients after shard(): take parameters(), or zero_grad(), of what it returned"
        )
    return Tensor.grad.__get__(parameter)  # type: ignore[union-attr, no-any-return]


class WholeParameter(WatchedParameter):
    """A parameter to compute with. It has a gradient only while autograd runs: then that is moved to the shards."""

    # HACK: it replaces a property of torch's. Without it, an optimizer of the module's own parameters would train nothing.
    grad = property(_gradient, Tensor.grad.__set__)  # type: ignore[union-attr]

    def detach(self) -> Tensor:
        """A tensor of the same class, as ``nn.Parameter()`` of this asks for."""
        return super().detach().as_subclass(WholeParameter)


class DirectGradientHook:
    """A hook that fires if autograd puts a gradient into a shard itself: that of a penalty on ``parameters()``. Gradients of the loss
    go to the whole parameters."""

    def __init__(self, shard: nn.Parameter) -> None:
        self.fired = False
        shard._direct_gradient_hook = self  # type: ignore[attr-defined]
        shard.register_post_accumulate_grad_hook(self)

    def __call__(self, _: Tensor) -> None:
        self.fired = True

    @staticmethod
    def of(shard: nn.Parameter) -> DirectGradientHook:
        """That of a shard."""
        return shard._direct_gradient_hook  # type: ignore[attr-defined,no-any-return]


class ReplacedParameter(nn.Parameter):
    """A parameter from before ``shard()``. A module, function or optimizer that still has it learns so when it computes with it."""

    _sharded_as: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Its shape, dtype and so on may be read, but not its gradient: an optimizer that has it would train nothing.
        if func.__name__ in ("__get__", "__repr__") and func != Tensor.grad.__get__:  # type: ignore[union-attr]
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        (name, *_) = (one._sharded_as for one in tree_leaves((args, kwargs)) if isinstance(one, ReplacedParameter))
        raise RuntimeError(
            f"this is the parameter {name!r} from before shard(), which nothing trains any more: let modules, functions and lists "
            "read it from the module that has it, each time, and build optimizers from parameters() of what shard() returned"
        )


def mark_replaced(parameter: nn.Parameter, name: str) -> None:
    """Refuse all further use of a parameter that was sharded under this name."""
    parameter._sharded_as = name  # type: ignore[attr-defined]
    parameter.__class__ = ReplacedParameter


def writes(parameters: Sequence[nn.Parameter]) -> list[int]:
    """How often each of them has been written to."""
    return [one._version for one in parameters]
