"""common/training/window.py: what is logged is the whole job's, not rank 0's."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest
import torch

from common.data.datasets import Batch
from common.training.window import Window, WindowState, WindowTotals
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks


def slow_batches() -> Iterator[Batch]:
    time.sleep(0.02)
    yield Batch(torch.zeros(1), torch.zeros(1))


def two_windows() -> list[WindowTotals]:
    """On rank r, two micro-batches of r + 1 samples with loss r, all of them recognized on odd ranks."""
    with process_group() as env:
        window = Window(env.device)
        totals = []
        for _ in range(2):
            for _ in range(2):
                labels = torch.zeros(env.rank + 1, dtype=torch.int64)
                logits = torch.eye(2)[torch.full_like(labels, 1 - env.rank % 2)]
                window.add(torch.tensor(float(env.rank)), logits, labels)
            list(window.timed(slow_batches()))
            totals.append(window.reduce(env))
        return totals


def test_a_window_weighs_every_sample_of_every_rank_alike() -> None:
    for totals in run_ranks(two_windows, 3):
        for window in totals:  # the second is as the first: nothing is carried over
            assert window.samples == 2 * (1 + 2 + 3)
            assert window.loss == pytest.approx((1 * 0 + 2 * 1 + 3 * 2) / 6)
            assert window.accuracy == pytest.approx(2 / 6)
            assert 0 < window.data_wait <= 1
            assert window.images_per_s == pytest.approx(window.samples / window.seconds)


def test_what_lies_between_two_epochs_is_in_neither_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of 100 s after an epoch is not in the next epoch's seconds; those of a window that was saved are."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def batches() -> Iterator[Batch]:
        nonlocal now
        now += 2
        yield Batch(torch.zeros(1), torch.zeros(1))

    with process_group() as env:
        window = Window(env.device)
        list(window.timed(batches()))
        assert window.reduce(env).seconds == 2
        now += 100
        list(window.timed(batches()))
        saved = window.state()
        assert saved.seconds == 2
        now += 100
        window.restore(saved)
        now += 100
        list(window.timed(batches()))
        assert window.reduce(env).seconds == 4


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


def test_a_window_goes_on_where_it_was() -> None:
    with process_group() as env:
        whole, first, second = Window(env.device), Window(env.device), Window(env.device)
        loss, logits, labels = torch.tensor(1.25), torch.eye(2), torch.zeros(2, dtype=torch.int64)
        for window in (whole, whole, first):
            window.add(loss, logits, labels)
        second.restore(first.state())
        second.add(loss, logits, labels)
        totals, expected = second.reduce(env), whole.reduce(env)
        assert (totals.loss, totals.accuracy, totals.samples) == (expected.loss, expected.accuracy, 4)
        assert totals.seconds > 0


def test_windows_are_kept_or_summed_when_the_ranks_are_others() -> None:
    states = [WindowState(1.0, 2.0, 3, 0.5, 4.0), WindowState(10.0, 20.0, 30, 1.5, 6.0)]
    assert WindowState.redistribute(states, 2) == states
    assert WindowState.redistribute(states, 3) == [
        WindowState(11.0, 22.0, 33, 2.0, 5.0),
        *[WindowState(seconds=5.0)] * 2,
    ]


def test_a_window_without_a_sample_has_no_loss() -> None:
    with process_group() as env:
        totals = Window(env.device).reduce(env)
    assert math.isnan(totals.loss)
    assert totals.samples == 0
