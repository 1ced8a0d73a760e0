"""ddp/checkpoint/state_copy.py: a copy shares nothing with its source, and its memory is used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.errors import UsageError
from ddp.checkpoint.state_copy import StateCopy
from tests.ddp.checkpoint.samples import bits

CPU = torch.device("cpu")


def tree(value: float) -> dict[Any, Any]:
    return {
        "model": {"w": torch.full((2, 3), value), "n": torch.tensor(int(value))},
        "optimizer": {"state": {0: {"step": torch.tensor(value)}}, "param_groups": [{"lr": value, "betas": (0.9, 0.99)}]},
        "ranks": [{"buffers": {"mean": torch.full((4,), value)}, "window": (value, 2)}],
    }  # fmt: skip


def taken(copy: StateCopy, state: Any) -> Any:
    copy.make_room(state)
    copy.take(state)
    return copy.read()


def test_a_copy_shares_nothing_and_reuses_the_memory_of_an_earlier_one() -> None:
    source, copy = tree(1.0), StateCopy(CPU)
    first = taken(copy, source)
    assert bits(first) == bits(tree(1.0))
    source["model"]["w"].fill_(5)
    source["ranks"][0]["buffers"]["mean"].fill_(5)
    assert bits(first) == bits(tree(1.0))
    second = taken(copy, tree(2.0))
    assert bits(second) == bits(tree(2.0))
    for path in (("model", "w"), ("model", "n"), ("optimizer", "state", 0, "step"), ("ranks", 0, "buffers", "mean")):
        before, after = first, second
        for key in path:
            before, after = before[key], after[key]
        assert before.data_ptr() == after.data_ptr()


def test_a_copy_has_no_gradients_and_no_graph() -> None:
    copy = StateCopy(CPU)
    for _ in range(2):
        assert not taken(copy, torch.nn.Parameter(torch.ones(2))).requires_grad


TENSORS = st.builds(
    lambda shape, dtype, value: torch.full(shape, value, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.integers(0, 99),
)
TREES = st.recursive(
    st.one_of(TENSORS, st.integers(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.integers(0, 3), inner, max_size=3)),
    max_leaves=8,
)


@given(before=TREES, now=TREES)
def test_an_earlier_copy_of_another_shape_is_not_reused(before: Any, now: Any) -> None:
    """Another shape or dtype, another number of entries, another kind of thing."""
    copy = StateCopy(CPU)
    for state in (before, now):
        assert bits(taken(copy, state)) == bits(state)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_copy_lies_in_memory_as_its_source(memory_format: torch.memory_format) -> None:
    source = torch.randn(4, 3, 5, 2).to(memory_format=memory_format)
    assert taken(StateCopy(CPU), source).stride() == source.stride()


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch, "empty_like", refuse)
    with pytest.raises(UsageError, match=r"^--async-checkpoint .* leave it out \(CUDA error: out of memory\)$"):
        StateCopy(CPU).make_room(tree(1.0))
