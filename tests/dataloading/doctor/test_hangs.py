"""A loader that hangs: where each process is, and when a run is over."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from dataloading.doctor.hangs import Patience, explain
from dataloading.doctor.measured import Loader, Process
from tests.support.launch import REPOSITORY

SCRIPT = "def load(index):\n    with lock:\n        return run(['convert', index])\n"
WORKER = """\
Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "{project}/dataloading/doctor/watch/sampling.py", line 80 in _run

Current thread 0x02 (most recent call first):
{frames}
  File "/site-packages/torch/utils/data/_utils/fetch.py", line 52 in fetch
  File "/site-packages/torch/utils/data/_utils/worker.py", line 349 in _worker_loop
"""
IDLE = """\
Current thread 0x02 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "/site-packages/torch/utils/data/_utils/worker.py", line 320 in _worker_loop
"""


def stack(pid: int, text: str) -> str:
    return f"{pid:>10}\n{text}"


def explained(tmp_path: Path, *stacks: str, **alive: str) -> list[str]:
    events: list[Any] = [{"kind": "iterator", "workers": [11, 12]}, {"kind": "threads", "alive": list(alive.items())}]
    loader = Loader({"line": f"{tmp_path}/train.py:9"}, [Process(0, events, {})])
    return list(explain([loader], stacks, Patience(tmp_path, 30, 60, True)))


def test_a_worker_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(SCRIPT)
    own = f'  File "{tmp_path}/data.py", line {{}} in load'
    at_lock = WORKER.format(project=REPOSITORY, frames=own.format(2))
    waits = '  File "/usr/lib/python3.11/subprocess.py", line 9 in _try_wait'
    at_child = WORKER.format(project=REPOSITORY, frames=f"{waits}\n{own.format(3)}")
    lines = explained(tmp_path, stack(11, at_child), stack(12, at_lock))
    assert lines[0] == "no batch in 60 s:"
    assert "worker 0 (process 11)" in lines[1] and "data.py:3: return run(" in lines[1]
    assert "worker 1 (process 12)" in lines[2] and "data.py:2: with lock:" in lines[2]


def test_an_idle_worker_and_threads_that_lived_before_the_fork(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("\nlog.acquire()\n")
    lines = explained(tmp_path, stack(11, IDLE), logger=f"{tmp_path}/train.py:2")
    assert lines[1] == "  worker 0 (process 11) waits for indices"
    assert "thread logger lived at" in lines[-1] and "train.py:2: log.acquire()" in lines[-1]


@pytest.mark.parametrize(
    ("waits_for", "first_for", "over", "hangs"),
    [(0, 0, False, False), (0, 40, True, False), (70, 0, True, True), (70, 100, True, True), (5, 40, False, False)],
)
def test_a_run_is_over(waits_for: float, first_for: float, over: bool, hangs: bool, tmp_path: Path) -> None:
    """A run that waits for a batch is not ended before its timeout, so that a hang is seen as one."""
    now = time.monotonic()
    moments = (now - seconds if seconds else 0.0 for seconds in (waits_for, first_for))
    (tmp_path / f"{os.getpid()}.waits").write_bytes(struct.pack("dd", *moments))
    patience = Patience(tmp_path, seconds=30, timeout=60)
    assert (patience.is_over(), patience.hangs) == (over, hangs)
