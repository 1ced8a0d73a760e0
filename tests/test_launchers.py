"""tests/launchers.py: nine launchers, one digest; and nothing is left of them."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests import launchers, slurm
from tests.support.launch import start_command

pytestmark = pytest.mark.examples


@pytest.fixture(autouse=True)
def _needs_a_cluster() -> None:
    if reason := slurm.why_not():
        pytest.skip(reason)


@pytest.mark.timeout(900)
def test_nine_launchers_come_to_one_digest() -> None:
    lines: list[str] = []
    digests = launchers.run(list(launchers.LAUNCHERS), lines.append)
    assert len(digests) == 9
    assert len(set(digests.values())) == 1, "\n".join(lines)
    assert not any(name in lines for name in ("/tmp", "raw-ddp")), lines


def daemons() -> list[str]:
    names = ("munged", "slurmctld", "slurmd", "slurmstepd")
    found = [process.info["name"] for process in psutil.process_iter(["name"])]
    return [name for name in found if name in names]


def test_nothing_is_left_after_ctrl_c() -> None:
    before = daemons(), sorted(Path("/etc/netns").glob("raw-ddp*"))
    with start_command("tests.launchers", "srun") as process:
        deadline = time.monotonic() + 60
        while "slurmctld" not in daemons():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert (daemons(), sorted(Path("/etc/netns").glob("raw-ddp*"))) == before
    pid = f"-{process.pid}"
    assert pid not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
