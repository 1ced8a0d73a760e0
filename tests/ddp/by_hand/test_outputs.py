"""ddp/by_hand/outputs.py: the tensors of whatever a module returns."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ddp.by_hand.outputs import tensors_in

A, B, C = (torch.tensor(float(number)) for number in range(3))
Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    logits: Any
    hidden: Any = None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (A, [A]),
        ((A, [B, None]), [A, B]),
        ({"a": A, "b": (B, 3), "c": "text"}, [A, B]),
        (Pair(A, B), [A, B]),
        (Output(A, [B, Output(C)]), [A, B, C]),
        ([Output({"a": A}), Output], [A]),
        (None, []),
    ],
)
def test_tensors_are_found_wherever_they_are(output: Any, expected: list[torch.Tensor]) -> None:
    found = list(tensors_in(output))
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]
