"""Settings that are tried in scripts and programs, whose best setting is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from common.benchmarking.other_work import OtherWork
from dataloading.dataset.batches import FETCH_THREADS
from dataloading.doctor.check import check_best
from dataloading.doctor.script_run import Script
from dataloading.doctor.trials import try_loader, try_settings


def test_a_loader_that_gives_nothing_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherWork, "doubt", lambda _: None)
    tried = try_loader(DataLoader(TensorDataset(torch.zeros(1)), batch_size=1), 1.0)
    assert tried.gains == []
    assert tried.notes == ["no setting could be tried: the loader gave 1 batches, which are too few to time"]


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
    assert [steps for steps, *_ in check_best(script, tried, 30.0, said.append)] == [60, 60]
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
from dataloading.doctor.trials import try_loader

class Late(Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.004)
        return index

if __name__ == "__main__":
    tried = try_loader(DataLoader(Late(), batch_size=16), 25.0)
    print(json.dumps(tried.gains[0].setting))
"""


@pytest.mark.examples
def test_a_loader_of_a_program_is_told_its_best_setting(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IN_PROGRAM)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout)["fetch_threads"] == FETCH_THREADS
