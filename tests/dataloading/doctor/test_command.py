"""The command, on scripts that fail, hang, or have no loader to speak of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import error_lines, run_command

pytestmark = pytest.mark.examples

LOOP = """
import sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
lock = threading.Lock()
class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        return torch.ones(3) * index
class Stream(IterableDataset):
    def __iter__(self):
        while True: yield 1.0
class Locked(Samples):
    def __getitem__(self, index):
        with lock: return index
def train(loader):
    for batch in loader: time.sleep(0.02)
"""
FAILS = "train(DataLoader(Samples(), 8, num_workers=2))\nraise ValueError('no such label')\n"
HANGS = """
def hold():
    with lock: time.sleep(3600)  # while workers are forked
threading.Thread(target=hold, name="uploader", daemon=True).start()
train(DataLoader(Locked(), 8, num_workers=1))
"""


def doctor(tmp_path: Path, script: str, *flags: str) -> tuple[int, str, list[str]]:
    """The exit status, the report, and lines of errors."""
    (tmp_path / "train.py").write_text(LOOP + script)
    done = run_command("dataloading.doctor", "--device=cpu", "--trials=0", *flags, "--", "train.py", cwd=tmp_path)
    return done.returncode, done.stdout, error_lines(done.stderr)


def test_a_script_that_fails(tmp_path: Path) -> None:
    status, report, errors = doctor(tmp_path, FAILS)
    assert status == 2
    assert errors[-1].endswith(f"train.py:{LOOP.count(chr(10)) + 2}: ValueError: no such label")
    assert "train.py:18: DataLoader(Samples, batch_size=8, num_workers=2" in report and "seen: 8 batches" in report


def test_a_lock_that_another_thread_held_while_workers_were_forked(tmp_path: Path) -> None:
    status, report, _ = doctor(tmp_path, HANGS, "--timeout=3")
    assert status == 1
    assert "it gave no batch" in report and "no batch in 3 s:" in report
    assert "worker 0 " in report and "is at train.py:15: with lock: return index" in report
    assert "thread uploader lived at train.py:20: with lock: time.sleep(3600)" in report


def test_an_endless_stream_is_ended(tmp_path: Path) -> None:
    status, report, _ = doctor(tmp_path, "train(DataLoader(Stream(), 4))\n", "--seconds=2")
    assert status == 0
    assert "of an unknown number of batches" in report and "nothing wrong was found" in report


def test_a_script_without_a_loader(tmp_path: Path) -> None:
    status, _, errors = doctor(tmp_path, "print('trained')\n")
    assert status == 2
    assert "no DataLoader was iterated over" in errors[-1]
