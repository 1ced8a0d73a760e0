"""common/training/recipes.py: settings that follow from the data, and what does not fit it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import UsageError
from common.training.recipes import LearningConfig, require_a_batch


@pytest.mark.parametrize(
    ("model", "samples", "parts", "remedy"),
    [
        ("mlp", 60, 2, "use --batch-size 60"),
        ("mlp", 50, 8, "use --batch-size 48"),
        ("mlp", 3, 4, "4 parts of a batch need 4"),
        ("resnet18", 7, 4, "4 parts of a batch need 8"),
    ],
)
def test_a_batch_size_that_works_is_named_where_the_data_is_too_small(
    model: str, samples: int, parts: int, remedy: str
) -> None:
    data: Any = SimpleNamespace(train=range(samples))
    config = LearningConfig(model=model)
    with pytest.raises(UsageError, match=f"^--batch-size 144 is more than the {samples} training samples: {remedy}$"):
        require_a_batch(config, data, parts)
    if "use" in remedy:
        require_a_batch(dataclasses.replace(config, batch_size=int(remedy.split()[-1])), data, parts)
