"""tests/launchers: nine launchers, one digest; and nothing is left of them."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.launchers import __main__ as launchers
from tests.launchers import slurm
from tests.support.launch import start_command

pytestmark = pytest.mark.examples


@pytest.fixture(autouse=True)
def _needs_a_cluster() -> None:
    if reason := slurm.why_not():
        pytest.skip(reason)


@pytest.mark.timeout(900)
def test_nine_launchers_come_to_one_digest() -> None:
    """The same job under nine launchers ends with the same weights.

    Claim (ddp/README.md): launch: nine launchers, one digest; nothing is left after Ctrl-C.
    """
    lines: list[str] = []
    digests = launchers.run(list(launchers.LAUNCHERS), lines.append)
    assert len(digests) == 9
    assert len(set(digests.values())) == 1, "\n".join(lines)
    assert not any(name in line for line in lines for name in ("/tmp", "raw-ddp")), lines


def test_nothing_is_left_after_ctrl_c() -> None:
    """After Ctrl-C, none of the launchers leaves a process.

    Claim (ddp/README.md): launch: nine launchers, one digest; nothing is left after Ctrl-C.
    """
    with start_command("tests.launchers", "srun") as process:
        started: list[psutil.Process] = []
        names = set[str]()
        deadline = time.monotonic() + 60
        while not {"munged", "slurmctld", "slurmd"} <= names:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
            with contextlib.suppress(psutil.NoSuchProcess):  # some end meanwhile
                started = psutil.Process(process.pid).children(recursive=True)
                names = {child.name() for child in started}
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        _, alive = psutil.wait_procs(started, 10)
    assert alive == []
    assert list(Path("/etc/netns").glob(f"raw-ddp-*-{process.pid}")) == []
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"-{process.pid} " not in spaces
