"""ddp/checkpoint/state_copy.py: a copy shares nothing with its source, and its buffers are reused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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


def copied(copy: StateCopy, state: Any) -> Any:
    copy.make_room(state)
    copy.take(state)
    return copy.read()


def test_a_copy_shares_nothing_and_reuses_the_memory_of_an_earlier_one() -> None:
    source, copy = tree(1.0), StateCopy(CPU)
    first = copied(copy, source)
    assert bits(first) == bits(tree(1.0))
    source["model"]["w"].fill_(5)
    source["ranks"][0]["buffers"]["mean"].fill_(5)
    assert bits(first) == bits(tree(1.0))
    second = copied(copy, tree(2.0))
    assert bits(second) == bits(tree(2.0))
    for path in (("model", "w"), ("model", "n"), ("optimizer", "state", 0, "step"), ("ranks", 0, "buffers", "mean")):
        before, after = first, second
        for key in path:
            before, after = before[key], after[key]
        assert before.data_ptr() == after.data_ptr()


def test_a_copy_has_no_gradients_and_no_graph() -> None:
    copy = StateCopy(CPU)
    for _ in range(2):
        assert not copied(copy, torch.nn.Parameter(torch.ones(2))).requires_grad


@pytest.mark.parametrize(
    "now",
    [
        {"w": torch.ones(3)},
        {"w": torch.ones(2, 2, dtype=torch.float64)},
        {"w": torch.ones(2, 2), "more": [torch.zeros(1), None]},
        {"w": 3},
        [torch.ones(2, 2)],
        {},
    ],
)
def test_an_earlier_copy_of_another_shape_is_not_reused(now: Any) -> None:
    """Another shape or dtype, another number of entries, another kind of thing."""
    copy = StateCopy(CPU)
    for state in ({"w": torch.zeros(2, 2)}, now, {"w": torch.zeros(2, 2)}):
        assert bits(copied(copy, state)) == bits(state)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_copy_lies_in_memory_as_its_source(memory_format: torch.memory_format) -> None:
    source = torch.randn(4, 3, 5, 2).to(memory_format=memory_format)
    assert copied(StateCopy(CPU), source).stride() == source.stride()


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch, "empty_like", refuse)
    with pytest.raises(UsageError, match=r"^--async-checkpoint .* leave it out \(CUDA error: out of memory\)$"):
        StateCopy(CPU).make_room(tree(1.0))
