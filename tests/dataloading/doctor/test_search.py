"""The search for settings, on turns that are made up."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from common.benchmarking.other_work import OtherWork
from dataloading.doctor import search
from dataloading.doctor.check import predicted_epoch
from dataloading.doctor.search import ON_EACH_WORKER, Search, Tried, in_words
from dataloading.doctor.watch.settings import Setting
from dataloading.doctor.watch.turn import NoTurn, Turn

NO_WORKERS: Setting = {"num_workers": 0}
FACTS = {
    "present": NO_WORKERS,
    "length": None,
    "threads": False,
    "whole_batches": False,
    "iterable": False,
}


def turn(step_s: float, start_s: float = 0.0, *, busy_s: float = math.inf, workers: int = 1) -> Turn:
    """A turn of 10 steady batches."""
    return Turn([start_s + step_s] * workers + [step_s] * 10, [0.0] * (10 + workers), workers, 10, 0.0, busy_s)


def searched(cost: Any, **facts: Any) -> Tried:
    """The end of a search over turns that are made up."""
    return Search(lambda setting, batches: cost(setting), {**FACTS, **facts}, 60.0, "train.py:8").run()


def with_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Nobody else uses them."""
    monkeypatch.setattr(search, "usable_cores", lambda: cores)
    monkeypatch.setattr(OtherWork, "doubt", lambda _: None)


def test_the_best_number_of_workers_is_found_and_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 4)
    tried = searched(lambda setting: turn(1 / min(4, 1 + setting["num_workers"])))
    assert tried.gains[0].setting == {"num_workers": 4}  # 3 is not tried
    assert tried.gains[0].ratio.median == pytest.approx(4.0)
    assert tried.lines[0] == "train.py:8: num_workers=4: 4.00x [4.00 to 4.00] as many batches/s"
    assert tried.now == pytest.approx(1.0)


def test_where_nothing_helps_nothing_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)
    tried = searched(lambda setting: turn(1.0))
    assert tried.gains == []
    assert tried.lines == ["train.py:8: no setting that was tried helps: 1.0 batches/s"]


def test_a_gain_that_the_present_setting_has_over_itself_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The present setting's turns differ by a factor of 2, and another one is faster by a fifth."""
    with_cores(monkeypatch, 2)
    number = iter(range(10**6))
    calm: list[bool] = [True]

    def cost(setting: Setting) -> Turn:
        if setting["num_workers"] == 2:
            return turn(0.8)
        return turn(1.0 + (next(number) % 2 if not calm[0] else 0.0))

    confirm = Search._confirm

    def noisy(*arguments: Any) -> None:
        calm[0] = False
        confirm(*arguments)

    monkeypatch.setattr(Search, "_confirm", noisy)
    assert searched(cost).gains == []


def test_kept_workers_are_advised_where_epochs_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        starts = setting["num_workers"] and not setting["persistent_workers"]
        return turn(1 / (1 + setting["num_workers"]), 30.0 if starts else 0.0)

    present = {**search.DEFAULTS, "num_workers": 2}
    short = searched(cost, length=20, present=present)
    assert short.gains[0].setting == {"persistent_workers": True}
    assert searched(cost, length=10**6, present=present).gains == []


def test_late_samples_are_fetched_in_threads_or_by_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        return turn(1 / max(1, setting["num_workers"]) / setting.get("fetch_threads", 1), busy_s=0.0)

    assert "fetch_threads" in searched(cost, threads=True).gains[0].setting
    more = searched(cost, threads=False).gains[0].setting
    assert more["num_workers"] == search.MANY_WORKERS
    with_cores(monkeypatch, 12)
    assert searched(cost, threads=False).gains[0].setting["num_workers"] == search.MANY_WORKERS
    with_cores(monkeypatch, 2)
    working = searched(lambda setting: turn(1 / max(1, setting["num_workers"])), threads=True)
    assert working.gains[0].setting == {"num_workers": 2}


def test_changes_that_help_are_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        ordered, few = setting.get("in_order", True), setting.get("prefetch_factor", 2) == 2
        return turn((2 if ordered else 1) * (1.5 if few else 1) / (1 + setting["num_workers"]))

    best, single = searched(cost).gains[:2]
    assert best.setting == {"num_workers": 2, "prefetch_factor": 4, "in_order": False}
    assert single.setting == {"num_workers": 2, "in_order": False}


def test_a_setting_that_fails_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        if setting["num_workers"]:
            raise NoTurn("no batch in 30 s")
        return turn(1.0)

    tried = searched(cost)
    assert tried.gains == []
    assert tried.notes[:2] == [f"not tried: num_workers={number}: no batch in 30 s" for number in (1, 2)]


def test_changes_that_fail_together_are_named_and_the_best_alone_is_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        ordered, few = setting.get("in_order", True), setting.get("prefetch_factor", 2) == 2
        if not (ordered or few):
            raise NoTurn("no batch in 30 s")
        return turn((2 if ordered else 1) * (1.5 if few else 1) / (1 + setting["num_workers"]))

    tried = searched(cost)
    assert [gain.setting for gain in tried.gains] == [{"num_workers": 2, "in_order": False}, {"num_workers": 2}]
    assert tried.notes == ["not tried: num_workers=2, prefetch_factor=4, in_order=False: no batch in 30 s"]


def test_a_stream_that_each_worker_may_repeat_is_told_beside_the_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        return turn(1 / max(1, setting["num_workers"]))

    assert searched(cost, iterable=True).lines[-1] == ON_EACH_WORKER
    assert not searched(cost).notes


def test_settings_for_which_no_time_is_left_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 4)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def cost(setting: Setting) -> Turn:
        clock[0] += 8.0
        return turn(1.0)

    tried = searched(cost)
    assert tried.notes[:2] == [f"not tried: num_workers={number}: no time was left" for number in (2, 4)]


def test_an_epoch_is_its_start_and_its_steps() -> None:
    kept = Tried("train.py:8", best=[turn(0.1, 0.2, workers=2)] * 3, started=turn(0.1, 5.0), warm_up_s=1.0)
    (first, *_) = kept.best
    assert first.epoch_s(52) == pytest.approx(2 * 0.3 + 50 * 0.1)
    assert predicted_epoch(kept, 52, first=False) == pytest.approx(5.6)
    assert predicted_epoch(kept, 52, first=True) == pytest.approx(5.6 + 1.0 + (5.1 - 0.6))


def test_settings_read_as_they_are_typed() -> None:
    words = in_words({"num_workers": 2, "in_order": False, "fetch_threads": 16})
    assert words.startswith("num_workers=2, in_order=False, threads: ThreadedFetch(dataset, 16)")
