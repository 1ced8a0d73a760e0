"""common/benchmarking/other_work.py: whether other programs used the cores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.benchmarking.other_work import _counters, doubt


@pytest.mark.parametrize(
    ("free", "disturbed"),
    [(20.0, False), (18.5, False), (16.0, True), (5.0, True), (600.0, False)],
)
def test_cores_that_others_use_are_a_doubt(free: float, disturbed: bool) -> None:
    """The share of ten seconds on two cores. (With a cgroup's quota, there are more cores than the two that may be used.)"""
    assert (doubt(10.0, free, 2) is not None) == disturbed


def test_the_line_says_how_many_cores_were_left() -> None:
    assert str(doubt(10.0, 5.0, 2)).startswith("other programs left 0.5 of 2 cores to this benchmark, so ")


def test_the_work_of_our_own_processes_is_not_that_of_others() -> None:
    _, _, before = _counters()
    work = "import time\nwhile time.process_time() < 0.5: pass"
    # It starts a process, and ends before that one is looked at.
    subprocess.run([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"])
    _, _, after = _counters()
    assert after - before >= 0.5
