"""Settings of all tests, and the guard that nothing a test started outlives it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read when torch is imported, here and in all that the tests start. OpenMP's threads spin while they wait for each other,
# and would take the cores from the other processes of the tests, which took a sixth longer in all. No result depends on it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# For each connection to a store, both ends ask DNS for the name of ::ffff:127.0.0.1, which /etc/hosts lacks. An answer that is
# lost costs the resolver's timeout, by default five seconds. A job makes several connections.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import hypothesis
import psutil
import pytest

from tests.support.fake_gpu import fake_gpu as fake_gpu
from tests.support.ranks import close_pool, pool_pids
from tests.support.user_errors import user_error as user_error

pytest_plugins = ["tests.support.gpus"]

TESTS = Path(__file__).parent

# Deadlines would assert times; random examples would make a red test unrepeatable.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# And nohup has them ignore the closing of the terminal. They still do, but what they start hears it.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(scope="session", autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """torch's and Hypothesis's objects are so many that looking through all of them takes a good part of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Below this process, a test leaves only multiprocessing's own two helpers, the pool of ranks, and what a fixture of its
    module has started, which was there before the test."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    _require_no_process(before)


@pytest.fixture(autouse=True, scope="session")
def _no_process_is_left_at_the_end() -> Iterator[None]:
    """Then the modules' own are gone too."""
    yield
    _require_no_process(set())


def _require_no_process(allowed: set[int]) -> None:
    helpers = psutil.Process().children()
    allowed = allowed | pool_pids()
    below = psutil.Process().children(recursive=True)
    left = [process for process in below if process not in helpers and process.pid not in allowed]
    if left:
        gc.collect()  # a loader that the traceback of an error refers to
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, f"left running: {[process.cmdline() for process in alive]}"
    others = [p for p in helpers if p.pid not in allowed and not any("multiprocessing" in part for part in p.cmdline())]
    assert not others, f"left running: {[process.cmdline() for process in others]}"


# They start many commands or jobs of ranks; the longest of each tier first.
LONG_FILES = (
    "test_faults.py",
    "ddp/resilience/test_elastic.py",
    "test_soak.py",
    "ddp/gpu_check/test_run.py",
    "launchers/test_launchers.py",
    "test_examples.py",
    "examples/test_lifted.py",
    "ddp/test_train.py",
    "ddp/test_commands.py",
    "ddp/by_hand/test_conformance.py",
    "ddp/rendezvous/test_process_group.py",
    "dataparallel/test_train.py",
    "ddp/test_files.py",
    "ddp/by_hand/test_equality.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(TESTS).as_posix(), len(rank)))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``, one process runs all tests of a file, which share its fixtures. The files that take minutes come first, or
    one process would end with such a file while the others have nothing left to do."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            # Attempts share no fixture, so those of another class (their ids are CLASS-NUMBER) may run in another process.
            is_attempt = "adversary/test_attempts.py" in nodeid
            return nodeid.rpartition("-")[0] if is_attempt else str(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # it would begin with the files of most tests, most of which are short
    return Scheduling(config, log)


def pytest_unconfigure() -> None:
    close_pool()
