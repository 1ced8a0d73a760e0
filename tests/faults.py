"""Faults on demand: real runs of ``ddp.train`` under torchrun, what may befall them, and a look at what is left behind.

    torchrun --nproc_per_node=2 -m tests.faults [flags of ddp.train]

trains with losses that are nan on one rank in a few steps, which :func:`poison` chooses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import ddp.train
from common.data.datasets import ImageData
from common.files.atomic_files import SCRATCH
from common.training.metrics import read_metrics
from ddp.checkpoint import directory, load, storage
from ddp.job import Job
from tests.support.launch import REPOSITORY, clean_environment, error_lines

MARK = "RUN_UNDER_TEST"  # in the environment of every process of a run: torchrun gives each rank a session of its own
POISON = "POISONED_RANK_AND_STEPS"

# Two epochs of 20 steps, a checkpoint after every third; BatchNorm and dropout, since these differ between ranks.
STEPS = 40
SMALL = (
    "--device", "cpu", "--train-samples", "320", "--test-samples", "32", "--batch-size", "16", "--epochs", "2",
    "--lr", "0.02", "--log-every", "4", "--checkpoint-every", "3", "--threads", "1",
)  # fmt: skip

TIMINGS = ("seconds", "images_per_s", "data_wait", "waited")


class Run:
    """A command and all processes that it started, also those with another parent by now.

    :ivar run_dir: where it trains; :ivar pids: of all processes that were seen
    """

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.run_dir, self.pids = run_dir, {process.pid}
        self._process, self._mark, self._log = process, f"{MARK}={mark}".encode(), log

    @property
    def output(self) -> str:
        """What all its processes have written to stdout and stderr."""
        return self._log.read_text(errors="replace")

    @property
    def errors(self) -> list[str]:
        """The lines that report a user error."""
        return error_lines(self.output)

    @property
    def torchrun(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def processes(self) -> list[psutil.Process]:
        """All that live."""
        alive = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if self._mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    alive.append(psutil.Process(int(entry)))
        self.pids.update(process.pid for process in alive)
        return alive

    def ranks(self) -> dict[int, psutil.Process]:
        """The process of each rank, which leads a session; its loader workers do not."""
        by_rank = {}
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                rank = process.environ().get("RANK")
                if rank is not None and os.getsid(process.pid) == process.pid:
                    by_rank[int(rank)] = process
        return by_rank

    def workers(self, rank: int) -> list[psutil.Process]:
        """The loader workers of a rank."""
        return [child for child in self.ranks()[rank].children() if child in self.processes()]

    def step(self) -> int:
        """The last optimizer step that is written down; 0 before the first."""
        records = read_metrics(self.run_dir)
        return int(records[-1]["step"]) if records else 0

    def is_over(self) -> bool:
        """Whether the command has ended; processes of it may live on."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float = 120.0) -> int:
        """The exit status of the command.

        :raises AssertionError: with its output, if it does not end in time
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.output}") from None

    def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
        """Poll until ``condition()`` is true; False if the command ends before.

        :raises AssertionError: with the output, if neither comes in time
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.is_over():
                return condition()
            assert time.monotonic() < deadline, f"{condition} did not come in {timeout_s} s:\n{self.output}"
            time.sleep(0.001)
        return True

    def saves(self) -> list[str]:
        """Checkpoints that are half written."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(_folder(self.run_dir)) if name.startswith(directory.SAVING)]
        return []

    def seconds_to_end(self, timeout_s: float) -> float | None:
        """For how long its processes live on from here; None if longer than ``timeout_s``."""
        began = time.monotonic()
        while self.processes():
            if time.monotonic() - began > timeout_s:
                return None
            time.sleep(0.05)
        return time.monotonic() - began


@contextlib.contextmanager
def training(
    run_dir: Path,
    *flags: str,
    ranks: int = 2,
    module: str = "ddp.train",
    torchrun: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
) -> Iterator[Run]:
    """``torchrun --nproc_per_node=RANKS -m MODULE --run-dir RUN_DIR FLAGS``; whatever comes of it is killed at the end.

    :param torchrun: more flags of torchrun's; :param before: a command that starts it, such as ``ip netns exec NAME``
    """
    mark = uuid.uuid4().hex
    with tempfile.NamedTemporaryFile(prefix="run-", suffix=".log") as log:
        command = [*before, sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *torchrun]
        process = subprocess.Popen(
            [*command, "-m", module, "--run-dir", str(run_dir), *flags],
            cwd=REPOSITORY,
            env={**clean_environment(), **(env or {}), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        run = Run(run_dir, process, mark, Path(log.name))
        try:
            yield run
        finally:
            while left := run.processes():  # again, for those that were just being started
                kill(left)
                time.sleep(0.01)
            process.wait()


def kill(processes: Iterable[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that live."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# Whom a SIGKILL may hit: a rank, the agent that started the ranks, or all at once, as when the power goes.
VICTIMS: dict[str, Callable[[Run], list[psutil.Process]]] = {
    "rank 0": lambda run: [process for rank, process in run.ranks().items() if rank == 0],
    "rank 1": lambda run: [process for rank, process in run.ranks().items() if rank == 1],
    "torchrun": lambda run: [run.torchrun],
    "everything": lambda run: run.processes(),
}


# Disks


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs of ``size`` in ``folder``; gives a function that changes its size."""
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield lambda size: _mount("-o", f"remount,size={size}", str(folder))
    finally:
        _unmount(folder)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in ``folder`` can be created, renamed or removed; even by root, whom no permission stops."""
    _mount("--bind", str(folder), str(folder))
    try:
        _mount(
            "-o", "remount,bind,ro", str(folder), busy_s=10.0
        )  # it has to wait for a file that is just being written
        yield
    finally:
        _unmount(folder)


def small_shared_memory(size: str) -> tuple[str, ...]:
    """A command that starts another with a ``/dev/shm`` of ``size``, which no other process sees."""
    privately = ("unshare", "--mount", "--propagation", "private")
    if subprocess.run([*privately, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    return (*privately, "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh")


def _mount(*arguments: str, busy_s: float = 0.0) -> None:
    """:param busy_s: how long to try while something is in the way"""
    deadline = time.monotonic() + busy_s
    while (mounting := subprocess.run(["mount", *arguments], capture_output=True, text=True)).returncode:
        if "busy" not in mounting.stderr or time.monotonic() > deadline:
            pytest.skip(f"nothing can be mounted here: {mounting.stderr.strip()}")
        time.sleep(0.005)


def _unmount(folder: Path) -> None:
    """Even if a process still has a file there: it goes with that."""
    subprocess.run(["umount", "--lazy", folder], check=True)


def truncate(path: Path, offset: int) -> None:
    """Cut a file off after ``offset`` bytes."""
    os.truncate(path, offset)


def flip_bit(path: Path, offset: int) -> None:
    """Flip the lowest bit of the byte at ``offset``."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


# A loss that is not finite


def poison(rank: int, steps: Iterable[int]) -> dict[str, str]:
    """The environment in which ``tests.faults`` gives this rank nan for its images in these steps."""
    return {POISON: ":".join(map(str, (rank, *steps)))}


def _train_poisoned() -> None:
    victim, *steps = map(int, os.environ[POISON].split(":"))
    train_step, to_input = ddp.train.train_step, ImageData.to_input

    def all_nan(*arguments: Any) -> torch.Tensor:
        return to_input(*arguments).fill_(torch.nan)

    @functools.wraps(train_step)
    def poisoned(job: Job, batches: Any) -> None:
        if job.env.rank != victim or job.step not in steps:
            return train_step(job, batches)
        with mock.patch.object(ImageData, "to_input", all_nan):
            return train_step(job, batches)

    with mock.patch.object(ddp.train, "train_step", poisoned):
        ddp.train.main()


# What is left


def outcome(run_dir: Path) -> dict[str, Any]:
    """All that a run has come to, flat: a value per tensor (its dtype, shape and bytes), number and metric; no timings.

    :raises common.cli.UsageError: when no checkpoint is whole
    """
    newest = storage.newest(run_dir)
    assert newest is not None, f"{run_dir} has no checkpoint"
    path, manifest = newest
    contents = {file.stem: load(path, file.stem) for file in path.glob("*.pt")}
    for rank in contents["ranks"]:
        rank["window"] = rank["window"][:3]  # then come its seconds
    contents["progress"] = manifest.progress
    contents["at"] = (manifest.epoch, manifest.step, manifest.step_in_epoch)
    contents["metrics"] = read_metrics(run_dir)
    return dict(_leaves("", contents))


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, torch.Tensor):
        yield name, (tree.dtype, tuple(tree.shape), tree.contiguous().numpy().tobytes())
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            if key not in TIMINGS:
                yield from _leaves(f"{name}.{key}", value)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(f"{name}[{index}]", value)
    else:
        yield name, tree


def differences(run_dir: Path, expected: Mapping[str, Any]) -> list[str]:
    """The names of what is not, bit for bit, as in another run's :func:`outcome`."""
    actual = outcome(run_dir)
    return sorted(name for name in {*actual, *expected} if actual.get(name) != expected.get(name))


def assert_nothing_left(*runs: Run) -> None:
    """All that runs on one directory, the last of which ended well, may leave is the last one's results: no process (and so
    no socket), no shared memory, no half-written file."""
    assert_nothing_runs(*runs)
    assert not scratch_files(runs[-1].run_dir)


def assert_nothing_runs(*runs: Run) -> None:
    """No process is left, and no shared memory."""
    for run in runs:
        left = run.seconds_to_end(timeout_s=10.0)
        assert left is not None, f"left running: {run.processes()}"
        owned = [
            name for name in os.listdir("/dev/shm") if run.pids & {int(number) for number in re.findall(r"\d+", name)}
        ]
        assert not owned, f"left in /dev/shm: {owned}"


def scratch_files(run_dir: Path) -> list[str]:
    """What was half written or half removed when somebody died."""
    half = (directory.SAVING, directory.REPLACED, directory.REMOVED)
    entries = [entry for folder in (run_dir, _folder(run_dir)) if folder.is_dir() for entry in folder.iterdir()]
    names = [entry.name for entry in entries]
    return [name for name in names if name.startswith(half) or SCRATCH.fullmatch(name) or name.endswith(".scratch")]


def _folder(run_dir: Path) -> Path:
    return run_dir / storage.FOLDER


if __name__ == "__main__":
    _train_poisoned()
