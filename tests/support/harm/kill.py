"""Runs of ``ddp.train`` whose processes a test stops, kills or lets hang.

:func:`training` starts a run under torchrun, as a user does. :func:`forked_training` forks the ranks with torch imported, in a
fraction of the time. Whatever happens, nothing of them outlives the test.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from common.signals import early_signals
from common.training.metrics import read_metrics
from ddp import train
from ddp.checkpoint import directory, storage
from ddp.rendezvous.worker_group import rendezvous
from tests.ddp.jobs import without_figures
from tests.support.launch import REPOSITORY, clean_environment, error_lines, wait_until
from tests.support.ranks import forked

MARK = "RUN_UNDER_TEST"  # in the environment of every process of a run: torchrun gives each rank a session of its own

# Two epochs of 30 steps, a checkpoint after every third; BatchNorm and dropout, since these differ between ranks.
JOB = (
    "--device", "cpu", "--threads", "1", "--train-samples", "720", "--test-samples", "100", "--batch-size", "24",
    "--epochs", "2", "--lr", "0.02", "--log-every", "1", "--checkpoint-every", "3",
)  # fmt: skip
STEPS_PER_EPOCH, STEPS = 30, 60

Plant = Callable[[], None]


class Run:
    """A run and all processes that it started, also those with another parent by now.

    :ivar run_dir: where it trains; :ivar pids: of all processes that were seen
    """

    def __init__(self, run_dir: Path, outputs: list[Path]) -> None:
        self.run_dir, self._outputs, self.pids = run_dir, outputs, set[int]()

    @property
    def output(self) -> str:
        """The output of all its processes to stdout and stderr."""
        return "".join(path.read_text(errors="replace") for path in self._outputs if path.exists())

    def hears_signals(self) -> bool:
        """Whether each rank that is forked is so far. (Of one that is started as a user does, nobody can tell.)"""
        return all(path.exists() for path in self._outputs)

    @property
    def errors(self) -> list[str]:
        """The lines that report a user error."""
        return error_lines(self.output)

    def log(self, rank: int) -> str:
        """All that the rank logged."""
        return (self.run_dir / "logs" / f"rank{rank}.log").read_text()

    def processes(self) -> list[psutil.Process]:
        """All that live."""
        raise NotImplementedError

    def ranks(self) -> dict[int, psutil.Process]:
        """The process of each rank that lives."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether the command has ended, on all ranks; processes of it may live on."""
        raise NotImplementedError

    def exit_statuses(self, timeout_s: float = 120.0) -> list[int | None]:
        """The exit status of each process that was started; None if it did not end in time."""
        raise NotImplementedError

    def finish(self, timeout_s: float = 120.0) -> None:
        """Wait until it has ended well."""
        statuses = self.exit_statuses(timeout_s)
        assert set(statuses) == {0}, f"{statuses}\n{self.output}"

    def workers(self, rank: int) -> list[psutil.Process]:
        """The loader workers of a rank."""
        alive = self.processes()
        return [child for child in self.ranks()[rank].children() if child in alive]

    def send(self, rank: int, number: int) -> None:
        """A signal to one rank."""
        self.processes()  # to remember them
        self.ranks()[rank].send_signal(number)

    def step(self) -> int:
        """The last optimizer step that is written down; 0 before the first."""
        return steps_done(self.run_dir)

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> int:
        """Wait until so many steps are done; returns how many are."""
        assert self.until(lambda: self.step() >= step, timeout_s), self.output
        return self.step()

    def until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> bool:
        """Poll until ``condition()`` is true; False if the command ends before.

        :raises AssertionError: with the output, if neither comes in time
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.is_over():
                return condition()
            assert time.monotonic() < deadline, f"{condition} did not come in {timeout_s} s:\n{self.output}"
            time.sleep(0.002)
        return True

    def saves(self) -> list[str]:
        """Checkpoints that are half written."""
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.run_dir / storage.FOLDER)
            return [name for name in names if name.startswith(directory.SAVING)]
        return []

    def seconds_to_end(self, timeout_s: float) -> float | None:
        """For how long its processes live on from here; None if longer than ``timeout_s``."""
        began = time.monotonic()
        while self.processes():
            if time.monotonic() - began > timeout_s:
                return None
            time.sleep(0.05)
        return time.monotonic() - began


class LaunchedRun(Run):
    """A run under torchrun, or of one process that no launcher started."""

    def __init__(self, run_dir: Path, output: Path, process: subprocess.Popen[bytes], mark: str, alone: bool) -> None:
        super().__init__(run_dir, [output])
        self._process, self._mark, self._alone = process, f"{MARK}={mark}".encode(), alone

    @property
    def torchrun(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def processes(self) -> list[psutil.Process]:
        alive = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if self._mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    alive.append(psutil.Process(int(entry)))
        self.pids.update(process.pid for process in alive)
        return alive

    def ranks(self) -> dict[int, psutil.Process]:
        """A rank leads a session; its loader workers do not."""
        by_rank = {}
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                rank = process.environ().get("RANK", "0" if self._alone else None)
                if rank is not None and os.getsid(process.pid) == process.pid:
                    by_rank[int(rank)] = process
        return by_rank

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float = 120.0) -> int:
        """The exit status of the command.

        :raises AssertionError: with its output, if it does not end in time
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.output}") from None

    def exit_statuses(self, timeout_s: float = 120.0) -> list[int | None]:
        return [self.wait(timeout_s)]


class ForkedRun(Run):
    """A run without torchrun."""

    def __init__(self, run_dir: Path, outputs: list[Path], forks: list[ForkServerProcess]) -> None:
        super().__init__(run_dir, outputs)
        self.forks = forks
        self._seen: set[psutil.Process] = set()

    def processes(self) -> list[psutil.Process]:
        for process in self.ranks().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update((process, *process.children(recursive=True)))
        self.pids.update(process.pid for process in self._seen)
        return [process for process in self._seen if is_alive(process)]

    def ranks(self) -> dict[int, psutil.Process]:
        by_rank = {}
        for rank, fork in enumerate(self.forks):
            with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
                if fork.is_alive():
                    by_rank[rank] = psutil.Process(fork.pid)
        return by_rank

    def is_over(self) -> bool:
        return not any(fork.is_alive() for fork in self.forks)

    def exit_statuses(self, timeout_s: float = 120.0) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        for fork in self.forks:
            fork.join(max(0.0, deadline - time.monotonic()))
        return [fork.exitcode for fork in self.forks]


@contextlib.contextmanager
def training(
    run_dir: Path, *flags: str, ranks: int = 2, torchrun: Sequence[str] = (), before: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[LaunchedRun]:  # fmt: skip
    """``torchrun --nproc_per_node=RANKS -m ddp.train JOB --run-dir RUN_DIR FLAGS``; whatever comes of it is killed at the end.

    :param ranks: 0 for the one process of no job, without torchrun
    :param torchrun: more flags of torchrun's
    :param before: words before ``python``, of a command that starts another, such as ``ip netns exec NAME``
    """
    mark = uuid.uuid4().hex
    with tempfile.NamedTemporaryFile(prefix="run-", suffix=".log") as log:
        launcher = ("-m", "torch.distributed.run", f"--nproc_per_node={ranks}", *torchrun) if ranks else ()
        process = subprocess.Popen(
            [*before, sys.executable, *launcher, "-m", "ddp.train", *JOB, "--run-dir", str(run_dir), *flags],
            cwd=REPOSITORY,
            env={**clean_environment(), **(env or {}), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        run = LaunchedRun(run_dir, Path(log.name), process, mark, alone=not ranks)
        try:
            yield run
        finally:
            while left := run.processes():  # again, for those that were just being started
                kill(left)
                time.sleep(0.01)
            process.wait()


@contextlib.contextmanager
def forked_training(
    run_dir: Path, *flags: str, ranks: int = 2, plant: Plant | None = None, figures: bool = False
) -> Iterator[ForkedRun]:
    """``python -m ddp.train JOB FLAGS`` on every rank of a new job; all that is left of it is killed at the end of the block.

    :param ranks: 0 for the one process of no job
    :param plant: importable by name; called on every rank before it trains, to let something go wrong
    :param figures: whether they are drawn at the end
    """
    words = ["ddp.train", *JOB, "--run-dir", str(run_dir), *flags]
    outputs = [run_dir.with_suffix(f".output{rank}") for rank in range(max(1, ranks))]
    for output in outputs:
        output.unlink(missing_ok=True)  # of a run before
    with contextlib.ExitStack() as stack:
        environments = stack.enter_context(rendezvous(ranks)) if ranks else [{}]
        forks = stack.enter_context(forked(environments, _train, words, run_dir.with_suffix(".output"), plant, figures))
        yield ForkedRun(run_dir, outputs, forks)


def _train(words: list[str], output: Path, plant: Plant | None, figures: bool) -> None:
    early_signals.handle_signals()  # before there is its output
    own = output.with_suffix(f".output{os.environ.get('RANK', 0)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = words
    multiprocessing.set_start_method("fork", force=True)  # of loader workers, as on a command line
    if plant is not None:
        plant()
    with contextlib.nullcontext() if figures else without_figures():
        train.main()


def is_alive(process: psutil.Process) -> bool:
    """Not a process that has ended, for which its parent has not waited yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def kill(processes: Iterable[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send a signal to those that live."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# The victims of a SIGKILL: a rank, the agent that started the ranks, or all at once, as when the power goes.
VICTIMS: dict[str, Callable[[LaunchedRun], list[psutil.Process]]] = {
    "rank 0": lambda run: [process for rank, process in run.ranks().items() if rank == 0],
    "rank 1": lambda run: [process for rank, process in run.ranks().items() if rank == 1],
    "torchrun": lambda run: [run.torchrun],
    "everything": lambda run: run.processes(),
}


def steps_done(run_dir: Path) -> int:
    """How many steps the run has recorded."""
    return max((record["step"] for record in read_metrics(run_dir)), default=0)


def wait_for_step(run_dir: Path, step: int, timeout_s: float = 90.0) -> None:
    """Wait until a run has done so many steps, whoever has started it."""
    wait_until(lambda: steps_done(run_dir) >= step, timeout_s)
