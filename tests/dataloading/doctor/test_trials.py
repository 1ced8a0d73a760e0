"""The search for settings: on loaders whose best setting is known, and on turns that are made up."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from common.benchmarking.other_work import OtherWork
from dataloading.doctor import trials
from dataloading.doctor.script_run import Script
from dataloading.doctor.trials import Tried, check_best, in_words, predicted_epoch, try_settings
from dataloading.doctor.watch.settings import Setting, changed, facts_of, loader_turn, put_in
from dataloading.doctor.watch.turn import NoTurn, Turn, alone, take_turn

NO_WORKERS: Setting = {"num_workers": 0}
FACTS = {
    "present": NO_WORKERS,
    "length": None,
    "threads": False,
    "whole_batches": False,
    "one_thread": False,
    "fork": True,
}


def turn(step_s: float, start_s: float = 0.0, *, busy_s: float = math.inf, workers: int = 1) -> Turn:
    """A turn of 10 steady batches."""
    return Turn([start_s + step_s] * workers + [step_s] * 10, [0.0] * (10 + workers), workers, 10, 0.0, busy_s, True)


def searched(cost: Any, steps: float = math.inf, **facts: Any) -> Tried:
    """The end of a search over turns that are made up."""
    known: dict[str, Any] = {**FACTS, "start_method": "fork", **facts}
    return trials._Search(lambda setting, batches: cost(setting), known, 60.0, "train.py:8", steps).run()


def with_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Nobody else uses them."""
    monkeypatch.setattr(trials, "usable_cores", lambda: cores)
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

    confirm = trials._Search._confirm

    def noisy(*arguments: Any) -> None:
        calm[0] = False
        confirm(*arguments)

    monkeypatch.setattr(trials._Search, "_confirm", noisy)
    assert searched(cost).gains == []


def test_kept_workers_are_advised_where_epochs_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        starts = setting["num_workers"] and not setting["persistent_workers"]
        return turn(1 / (1 + setting["num_workers"]), 30.0 if starts else 0.0)

    present = {**trials.DEFAULTS, "num_workers": 2, "multiprocessing_context": "fork"}
    short = searched(cost, 20, present=present)
    assert short.gains[0].setting == {"persistent_workers": True}
    assert searched(cost, 10**6, present=present).gains == []


def test_late_samples_are_fetched_in_threads_or_by_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)

    def cost(setting: Setting) -> Turn:
        return turn(1 / max(1, setting["num_workers"]) / setting.get("fetch_threads", 1), busy_s=0.0)

    assert "fetch_threads" in searched(cost, threads=True).gains[0].setting
    more = searched(cost, threads=False).gains[0].setting
    assert more["num_workers"] == trials.MOST_WORKERS
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


def test_a_loader_that_gives_nothing_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cores(monkeypatch, 2)
    tried = trials.try_loader(DataLoader(TensorDataset(torch.zeros(1)), batch_size=1), 1.0)
    assert tried.gains == []
    assert tried.lines == [
        "no setting could be tried: with the present one, the loader gave 1 batches, which are too few to time"
    ]


def test_a_turn_times_the_batches_after_its_head() -> None:
    asked: list[int] = []
    measured = alone(take_turn(lambda: iter(range(10)), 2, 4, rest=False), lambda number, batch: asked.append(batch))
    assert asked == [0, 1, 2, 3, 4, 5]  # and no further
    assert (measured.head, measured.counted, len(measured.waits)) == (2, 4, 6)
    assert alone(take_turn(lambda: iter(range(10)), 2, 4, rest=True)).end_s > 0
    with pytest.raises(NoTurn, match="gave 1 batches"):
        alone(take_turn(lambda: iter(range(1)), 2, 4, rest=False))


def test_a_batch_that_does_not_come_ends_the_turn() -> None:
    def slow() -> Any:
        yield 0
        torch.multiprocessing.Event().wait(60)

    with pytest.raises(NoTurn, match="no batch in"):
        alone(take_turn(slow, 1, 1, rest=False, patience_s=0.2))


def test_an_interrupted_use_counts_as_the_others_do() -> None:
    interruptions = iter([False, False, True, False])
    measured = alone(take_turn(lambda: iter(range(4)), 1, 3, rest=True, interrupted=lambda: next(interruptions)))
    assert measured.uses[2] == pytest.approx((measured.uses[0] + measured.uses[1]) / 2)


def test_an_epoch_is_its_start_and_its_steps() -> None:
    kept = Tried("train.py:8", best=[turn(0.1, 0.2, workers=2)] * 3, started=turn(0.1, 5.0), warm_up_s=1.0)
    (first, *_) = kept.best
    assert first.epoch_s(52) == pytest.approx(2 * 0.3 + 50 * 0.1)
    assert predicted_epoch(kept, 52, first=False) == pytest.approx(5.6)
    assert predicted_epoch(kept, 52, first=True) == pytest.approx(6.6)


def test_a_copy_of_a_loader_has_the_setting_and_the_loader_keeps_its_own() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    twin = changed(
        loader, {"num_workers": 2, "persistent_workers": True, "in_order": False, "multiprocessing_context": "spawn"}
    )
    assert (twin.num_workers, twin.prefetch_factor, twin.persistent_workers) == (2, 2, True)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    put_in(twin, NO_WORKERS)
    assert str(list(twin)) == str(list(loader))
    threads = changed(loader, {**NO_WORKERS, "fetch_threads": 2})
    assert str(list(threads)) == str(list(loader))
    assert threads.dataset.tensors is loader.dataset.tensors  # type: ignore[attr-defined]


def test_whole_batches_are_offered_where_they_are_the_same() -> None:
    in_memory = DataLoader(TensorDataset(torch.arange(10), torch.arange(10.0)), batch_size=4)
    assert facts_of(in_memory)["whole_batches"]
    whole = changed(in_memory, {**NO_WORKERS, "whole_batches": True})
    assert str(list(whole)) == str(list(in_memory))
    assert len(whole) == len(in_memory)
    listed: Any = list(range(10))  # takes no list of indices
    assert not facts_of(DataLoader(listed, batch_size=4))["whole_batches"]
    own_collate = DataLoader(TensorDataset(torch.arange(10)), 4, collate_fn=lambda items: default_collate(items))
    assert not facts_of(own_collate)["whole_batches"]


def test_a_short_epoch_is_one_turn() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    assert len(alone(loader_turn(loader, 100)).waits) == 6
    assert len(alone(loader_turn(loader, 2)).waits) == 3


def test_settings_read_as_they_are_typed() -> None:
    words = in_words({"num_workers": 2, "multiprocessing_context": "fork", "fetch_threads": 16})
    assert words.startswith("num_workers=2, multiprocessing_context='fork', threads: ThreadedFetch(dataset, 16)")


SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

class Store(Dataset):
    def __len__(self):
        return 120
    def __getitems__(self, indices):
        time.sleep(0.02)
        return [torch.zeros(3)] * len(indices)

def main():
    loader = DataLoader(Store(), batch_size=2, shuffle=True)
    print(len(next(iter(loader))))
    for epoch in range(EPOCHS):
        for batch in loader:
            time.sleep(0.005)

if __name__ == "__main__":
    main()
"""


def script_of(folder: Path, text: str) -> Script:
    path = folder / "train.py"
    path.write_text(text)
    line = 1 + text.splitlines().index(next(line for line in text.splitlines() if "DataLoader(" in line))
    return Script([os.fspath(path)], dict(os.environ), f"{path}:{line}")


@pytest.mark.examples
@pytest.mark.parametrize("epochs", [2, 1000])
def test_a_script_is_told_its_best_setting_and_runs_with_it(tmp_path: Path, epochs: int) -> None:
    """Two epochs end before all is tried. A batch is a wait of 20 ms, so that workers help on any machine."""
    script = script_of(tmp_path, SCRIPT.replace("EPOCHS", str(epochs)))
    tried = try_settings(script, 10.0)
    best = tried.gains[0]
    assert best.setting["num_workers"] >= 2
    assert best.ratio.low > 1.5
    said: list[str] = []
    check = check_best(script, tried, 30.0, said.append)
    assert [steps for steps, *_ in check.epochs] == [60, 60]
    assert said[0].startswith("predicted with num_workers=")
    assert said[1].startswith("measured: ")


@pytest.mark.examples
def test_a_script_that_fails_or_has_no_loader_is_said_by_name(tmp_path: Path) -> None:
    fails = script_of(
        tmp_path, SCRIPT.replace("EPOCHS", "1").replace("time.sleep(0.02)", "raise OSError('the disk is gone')")
    )
    assert "the disk is gone" in str(try_settings(fails, 5.0).notes)
    never = script_of(tmp_path, "import torch\nDataLoader(\n".replace("DataLoader(", "print('DataLoader(')"))
    assert try_settings(never, 5.0).lines == [
        "no setting could be tried: the script did not use the loader, or no longer"
    ]


IN_PROGRAM = """
import json, time, torch
from torch.utils.data import DataLoader, Dataset
from dataloading.doctor.trials import best_settings

class Late(Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.004)
        return index

if __name__ == "__main__":
    (gain, *_) = best_settings(DataLoader(Late(), batch_size=16), 10.0)
    print(json.dumps(gain.setting))
"""


@pytest.mark.examples
def test_a_loader_of_a_program_is_told_its_best_setting(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IN_PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout)["fetch_threads"] == trials.FETCH_THREADS
