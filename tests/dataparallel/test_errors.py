"""dataparallel/parallel.py: errors of a failed replica, and arguments that are refused."""

from __future__ import annotations

import contextlib
import errno
import gc
import math
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dataparallel.parallel import HandwrittenDataParallel
from tests.dataparallel.modules import (
    Everywhere,
    assert_same,
    linear,
    rows,
    wrapped,
)


class Odd(Exception):
    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}, {detail}")
        self.code = code


class Fixed(Exception):
    def __str__(self) -> str:
        return "always this"


class Stop(BaseException):
    pass


class FixedStop(Stop):
    def __str__(self) -> str:
        return "always this"


class Failing(nn.Module):
    """Fails on a negative sample."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        super().__init__()
        self.layer, self.make = linear(), make

    def forward(self, x: Tensor) -> Any:
        if (x < 0).any():
            self.fail()
        return self.layer(x)

    def fail(self) -> None:
        raise self.make() from LookupError("the cause")


def failed(module: nn.Module, replica: int) -> tuple[HandwrittenDataParallel, BaseException]:
    """Run a forward pass on three replicas of which one fails, and return its error."""
    wrapper, x = wrapped(module, 3), torch.ones(6, 3, dtype=torch.float64)
    x[2 * replica] = -1
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any error
        wrapper(x)
    return wrapper, caught.value


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no good"), "replica 1 on cpu: no good"),
        (ValueError(), "replica 1 on cpu"),
        (KeyError("key"), repr("replica 1 on cpu: 'key'")),
        (StopIteration(3), "replica 1 on cpu: 3"),
        (Odd(7, detail="odd"), "replica 1 on cpu: 7, odd"),
        (torch.OutOfMemoryError("too much"), "replica 1 on cpu: too much"),
        (KeyboardInterrupt(), "replica 1 on cpu"),
        (FixedStop(), "always this"),
    ],
    ids=repr,
)
def test_an_error_names_the_replica_and_keeps_its_type_and_its_cause(error: BaseException, message: str) -> None:
    wrapper, caught = failed(Failing(lambda: error), 1)
    assert caught is error
    assert str(caught) == message
    assert repr(caught.__cause__) == "LookupError('the cause')"
    assert traceback.extract_tb(caught.__traceback__)[-1].name == "fail"
    assert_same(wrapper(rows(6).abs()), wrapper.module(rows(6).abs()))


@pytest.mark.parametrize("make", [lambda: Fixed(1, 2), lambda: FileNotFoundError(errno.ENOENT, "not there", "name")])
def test_an_error_whose_message_is_its_own_is_the_cause_of_one_that_names_the_replica(
    make: Callable[[], Exception],
) -> None:
    error = make()
    arguments, message = error.args, str(error)
    _, caught = failed(Failing(lambda: error), 2)
    assert type(caught) is RuntimeError
    assert str(caught) == f"replica 2 on cpu: {type(error).__name__}: {message}"
    assert caught.__cause__ is error
    assert (error.args, str(error)) == (arguments, message)


def test_the_first_replica_s_error_is_raised_when_several_fail() -> None:
    wrapper = wrapped(Failing(lambda: ValueError("no good")), 3)
    with pytest.raises(ValueError, match=r"^replica 1 on cpu: no good$"):
        wrapper(torch.tensor([[1.0], [-1], [-1]], dtype=torch.float64).expand(3, 3))


class Greedy(nn.Module):
    """Holds a large tensor when it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Any:
        large = x * 2
        self.held.append(weakref.ref(large))
        raise MemoryError("too much")


def test_an_error_that_is_dropped_keeps_nothing_alive() -> None:
    module = Greedy()
    wrapper = wrapped(module, 3)
    gc.disable()
    try:
        with contextlib.suppress(MemoryError):
            wrapper(rows(3))
        assert [held() for held in module.held] == [None] * 3
    finally:
        gc.enable()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("args", "kwargs", "dim", "message"),
    [
        ((), {}, 0, "nothing to scatter: the module was called without any tensor"),
        (([torch.tensor(1.0)],), {}, 0, r"argument 0\[0\] cannot be scattered: its shape \[\] has no dimension 0"),
        ((torch.ones(2, 3),), {}, 2, r"argument 0 cannot be scattered: its shape \[2, 3\] has no dimension 2"),
        (({"s": torch.eye(2).to_sparse()},), {}, 0, r"argument 0\['s'\] cannot be scattered: it is sparse"),
        (
            (),
            {"n": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)},
            0,
            "argument 'n' cannot be scattered: it is nested",
        ),
        (
            (3, torch.ones(4, 3)),
            {"k": {"a": (torch.ones(4), torch.ones(5))}},
            0,
            r"argument 'k'\['a'\]\[1\] has 5 samples in dimension 0 and argument 1 has 4: ",
        ),
    ],
)
def test_arguments_that_cannot_be_scattered(
    count: int, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, message: str
) -> None:
    """Tensors of different lengths are refused with both names.

    Claim (dataparallel/README.md): tensors of different lengths are refused with both names.
    """
    wrapper = wrapped(Everywhere(), count, dim)
    with pytest.raises(ValueError, match=f"^{message}"):
        wrapper(*args, **kwargs)


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


@pytest.mark.parametrize("constant", [3, None, "text", math.nan, np.arange(3), {1, 2}])
def test_a_constant_is_returned_when_all_replicas_agree(constant: Any) -> None:
    assert wrapped(Returning(), 3)(torch.arange(3.0), lambda number: constant)[1] is constant


@pytest.mark.parametrize(
    ("function", "first", "other"),
    [
        (lambda number: number, "0", "1"),
        (lambda number: torch.ones(1) if number else None, "None", "<class 'torch.Tensor'>"),
        (lambda number: [torch.ones(1)] * (number + 1), "(<class 'list'>, 1)", "(<class 'list'>, 2)"),
        (
            lambda number: {number: torch.ones(1)},
            "(<class 'dict'>, frozenset({0}))",
            "(<class 'dict'>, frozenset({1}))",
        ),
        (lambda number: np.arange(3), "array([0, 1, 2])", "array([0, 1, 2])"),
    ],
)
def test_replicas_that_do_not_agree(function: Callable[[int], Any], first: str, other: str) -> None:
    """Constants in which the replicas differ are refused with both values."""
    with pytest.raises(TypeError) as caught:
        wrapped(Returning(), 2)(torch.arange(2.0), function)
    assert str(caught.value).startswith(f"the replicas return {first} and {other}: only tensors can be joined")
