"""A loader worker that dies is found, and the process that meets its end goes on."""

from __future__ import annotations

import subprocess
import sys

from tests.support.launch import REPOSITORY, clean_environment

ONE_DIES = """
import os, signal
from torch.utils.data import DataLoader
from common.data.loaders import poll_for_deaths, start_worker

poll_for_deaths()
batches = iter(DataLoader(range(100_000), 1, num_workers=2, worker_init_fn=start_worker))
next(batches)
assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, "DataLoader set its handler"
os.kill(batches._workers[0].pid, signal.SIGKILL)
batches._workers[0].join()  # one that is not quite dead yet as it hands over a batch is another error
try:
    for _ in batches:
        pass
except RuntimeError as error:
    print(error)
del batches
print("closed")
"""


def test_a_dead_worker_is_found_without_a_signal_handler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ONE_DIES],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("DataLoader worker (pid(s)") and "exited unexpectedly" in first
    assert last == "closed"
