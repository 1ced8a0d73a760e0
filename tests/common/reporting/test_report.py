"""common/reporting/report.py: whether training waits for its data, in plain words."""

from __future__ import annotations

import pytest

from common.reporting.report import data_verdict, lost_to_data


@pytest.mark.parametrize(
    ("data_wait", "remedies", "text"),
    [
        (0.03, ["--workers 2"], "compute-bound: 3 % of each step waits for data"),
        (0.2, ["--workers 2"], "partly data-bound: 20 % of each step waits for data; try --workers 2"),
        (0.6, ["--fast", "--small"], "data-bound: 60 % of each step waits for data; try --fast or --small"),
        (0.6, [], "data-bound: 60 % of each step waits for data"),
    ],
)
def test_the_verdict_is_plain(data_wait: float, remedies: list[str], text: str) -> None:
    assert data_verdict(data_wait, remedies) == text


def test_a_wait_behind_which_the_gpu_works_is_no_loss() -> None:
    assert [lost_to_data(*both) for both in ((0.5, None), (0.2, 0.75), (0.5, 0.75))] == [0.5, 0.2, 0.25]
