"""ddp/resilience/run_report.py: what would load faster."""

from __future__ import annotations

from typing import Any

import pytest

from common.reporting.report import data_verdict
from ddp.config import TrainConfig
from ddp.resilience.run_report import faster_loading


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "try --workers 2"),
        ({"workers": 4}, "try more than --workers 4"),
        ({"dataset": "lfw"}, "try more than --workers 1 or --decoder simplejpeg"),
        (
            {"dataset": "lfw", "loader": "stock", "workers": 0},
            "try --workers 2 or --loader fast or --decoder simplejpeg",
        ),
        ({"dataset": "lfw", "decoder": "simplejpeg", "workers": 2}, "try more than --workers 2"),
    ],
)
def test_images_in_files_can_be_had_faster_in_more_ways(settings: dict[str, Any], advice: str) -> None:
    assert data_verdict(0.5, faster_loading(TrainConfig(**settings))).endswith(f"waits for data; {advice}")
