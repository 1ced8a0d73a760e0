"""What a model may do that averaging its gradients does not allow, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def unused(names: Sequence[str], remaining: Sequence[int]) -> RuntimeError:
    """:param remaining: for each parameter, how often its gradient still has to become ready"""
    without = [name for name, missing in zip(names, remaining, strict=True) if missing > 0]
    return RuntimeError(
        f"backward gave no gradient to {len(without)} of {len(names)} parameters: {_first(without)}. This rank's loss does not "
        "depend on them: pass find_unused_parameters=True, or freeze them before wrapping"
    )


def ready_twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {name} became ready twice in one backward pass: do several checkpoints use it? pass "
        "static_graph=True, or checkpoint with use_reentrant=False"
    )


def sparse(shape: Iterable[int]) -> RuntimeError:
    return RuntimeError(f"a gradient of {list(shape)} is sparse: build its embedding with sparse=False")


def require_same_dtypes(names: Sequence[str], parameters: Sequence[Tensor], dtypes: Iterable[torch.dtype]) -> None:
    """:raises RuntimeError: if parameters were converted after wrapping: autograd then forgets who waits for their gradients"""
    changed = [name for name, p, dtype in zip(names, parameters, dtypes, strict=True) if p.dtype != dtype]
    if changed:
        raise RuntimeError(
            f"{len(changed)} parameters have another dtype than when they were wrapped: {_first(changed)}. Their gradients "
            "are not averaged any more: convert the module first, then wrap it"
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)
