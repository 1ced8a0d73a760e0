"""common/report.py: what is logged is the whole job's, not rank 0's."""

from __future__ import annotations

import time

import pytest
import torch

from common.cli import UsageError
from common.process_group import process_group
from common.report import Window, WindowTotals, data_verdict
from tests.launch import run_ranks


def two_windows() -> list[WindowTotals]:
    """On rank r, two micro-batches of r + 1 samples with loss r, all of them recognized on odd ranks."""
    with process_group() as place:
        window = Window(place.device)
        totals = []
        for _ in range(2):
            for _ in range(2):
                labels = torch.zeros(place.rank + 1, dtype=torch.int64)
                logits = torch.eye(2)[torch.full_like(labels, 1 - place.rank % 2)]
                window.add(torch.tensor(float(place.rank)), logits, labels)
            with window.waiting():
                time.sleep(0.02)
            totals.append(window.reduce(place))
        return totals


def test_a_window_weighs_every_sample_of_every_rank_alike() -> None:
    for totals in run_ranks(two_windows, 3):
        for window in totals:  # the second is as the first: nothing is carried over
            assert window.samples == 2 * (1 + 2 + 3)
            assert window.loss == pytest.approx((1 * 0 + 2 * 1 + 3 * 2) / 6)
            assert window.accuracy == pytest.approx(2 / 6)
            assert 0 < window.data_wait <= 1
            assert window.images_per_s == pytest.approx(window.samples / window.seconds)


def test_windows_merge_by_their_samples_and_seconds() -> None:
    merged = WindowTotals.merge(
        [
            WindowTotals(samples=10, loss=1.0, accuracy=0.5, seconds=1.0, data_wait=0.5),
            WindowTotals(samples=30, loss=2.0, accuracy=0.9, seconds=4.0, data_wait=0.0),
        ]
    )
    assert merged == WindowTotals(samples=40, loss=1.75, accuracy=pytest.approx(0.8), seconds=5.0, data_wait=0.1)  # type: ignore[arg-type]
    assert merged.images_per_s == 8
    assert WindowTotals.merge([]).images_per_s == 0


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


def with_a_mistake() -> list[str]:
    """Rank 1 meets one in the second of three windows."""
    with process_group() as place:
        window, said = Window(place.device), []
        for number in range(3):
            window.add(torch.tensor(1.0), torch.eye(2), torch.zeros(2, dtype=torch.int64))
            if (place.rank, number) == (1, 1):
                window.mistake = UsageError("a file")
            try:
                window.reduce(place)
                said.append("")
            except UsageError as error:
                said.append(str(error))
                break
        return said


def test_a_window_ends_on_every_rank_with_the_mistake_of_one() -> None:
    assert run_ranks(with_a_mistake, 3) == [["", "[rank 1] a file"]] * 3
