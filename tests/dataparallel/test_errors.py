"""dataparallel/parallel.py: what is refused, and an error of a replica."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.dataparallel.modules import Everywhere, assert_same, linear, rows, wrapped


class Failing(nn.Module):
    """Fails on a negative sample."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = linear(), error

    def forward(self, x: Tensor) -> Any:
        if (x < 0).any():
            raise self.error from LookupError("the cause")
        return self.layer(x)


@pytest.mark.parametrize("error", [ValueError("no good"), torch.OutOfMemoryError("too much")])
def test_an_error_names_the_replica_and_keeps_its_type_and_its_cause(error: Exception) -> None:
    message = str(error)
    wrapper = wrapped(Failing(error), 3)
    with pytest.raises(type(error)) as caught:
        wrapper(torch.tensor([[1.0], [-1], [-1]], dtype=torch.float64).expand(3, 3))
    assert caught.value is error
    assert str(error) == f"replica 1 on cpu: {message}"
    assert repr(error.__cause__) == "LookupError('the cause')"
    assert traceback.extract_tb(error.__traceback__)[-1].name == "forward"
    assert_same(wrapper(rows(6).abs()), wrapper.module(rows(6).abs()))


class Unknown(dict[str, Any]):
    """A container that pytree does not look into."""


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("args", "kwargs", "dim", "message"),
    [
        ((), {}, 0, "nothing to scatter: the module was called without any tensor"),
        (([torch.tensor(1.0)],), {}, 0, "args[0][0] cannot be scattered: its shape [] has no dimension 0"),
        ((torch.ones(2, 3),), {}, 2, "args[0] cannot be scattered: its shape [2, 3] has no dimension 2"),
        (({"s": torch.eye(2).to_sparse()},), {}, 0, "args[0]['s'] cannot be scattered: only dense tensors can be cut"),
        ((Unknown(s=torch.ones(2)),), {}, 0, "args[0] cannot be scattered: it is a Unknown; pass a plain container"),
        (
            (3, torch.ones(4, 3)),
            {"k": {"a": (torch.ones(4), torch.ones(5))}},
            0,
            "kwargs['k']['a'][1] has 5 samples in dimension 0 and args[1] has 4: ",
        ),
    ],
)
def test_arguments_that_cannot_be_scattered(
    count: int, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, message: str
) -> None:
    """Tensors of different lengths are refused with both names.

    Claim (dataparallel/README.md): tensors of different lengths are refused with both names.
    """
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        wrapped(Everywhere(), count, dim)(*args, **kwargs)


@pytest.mark.parametrize(("layer", "name"), [(0, "0.weight"), (1, "1.running_mean")])
def test_a_module_on_another_device(layer: int, name: str) -> None:
    """A module that is not on the first device is refused with the name of the tensor."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False))
    module[layer].to("meta")
    with pytest.raises(RuntimeError, match=f"^the module's {name} is on meta, and not on the first device, cpu: call"):
        wrapped(module, 2)(rows(4))


class Returning(nn.Module):
    def forward(self, x: Tensor, function: Callable[[int], Any]) -> Any:
        return [x, function(int(x[0]))]


@pytest.mark.parametrize("constant", [3, None, "text", math.nan, np.arange(3)])
def test_a_constant_is_returned_when_all_replicas_agree(constant: Any) -> None:
    assert wrapped(Returning(), 3)(torch.arange(3.0), lambda number: constant)[1] is constant


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda number: number, "the replicas return 0 and 1: only tensors can be joined"),
        (lambda number: torch.ones(1) if number else None, "the replicas return None and tensor([1.]): only tensors"),
        (lambda number: np.arange(3), "the replicas return array([0, 1, 2]) and array([0, 1, 2]): only tensors"),
        (lambda number: [torch.ones(1)] * (number + 1), "the replicas return different structures: "),
        (lambda number: {number: torch.ones(1)}, "the replicas return different structures: "),
    ],
)
def test_replicas_that_do_not_agree(function: Callable[[int], Any], words: str) -> None:
    """Outputs in which the replicas differ are refused."""
    with pytest.raises(TypeError) as caught:
        wrapped(Returning(), 2)(torch.arange(2.0), function)
    assert str(caught.value).startswith(words)
