"""Real ranks for tests: processes with a process group of their own.

They are forked from a server process that has imported torch but never used it, and take the environment of the test: they see
GPUs if it does. They find each other as torchrun's workers do, through a store that this process holds. Most tests share one
pool of ranks, which stay and are given one function after another. A test that kills a rank, or changes its process for good,
takes fresh ones. Whatever happens, nothing that a test starts outlives the tests.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddp.rendezvous.process_group import process_group
from ddp.rendezvous.worker_group import rendezvous, take_environment
from tests.support.commands import load_command
from tests.support.process_state import ProcessState


class ForkedProcess(ForkServerProcess):
    """SIGINT is not blocked in it. A process has one fork server. A worker group starts it with SIGINT blocked, which the server's
    processes inherit."""

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        super().run()


class ForkServer(ForkServerContext):
    Process = ForkedProcess


FORK_SERVER = ForkServer()
SUPPORT = ("process_state", "drawn_glyphs")
FORK_SERVER.set_forkserver_preload(
    ["ddp.train", "torch._dynamo", "ddp.rendezvous.worker_group", *(f"tests.support.{name}" for name in SUPPORT)]
)


class Rank(NamedTuple):
    """A process, and the pipe through which it is given functions and sends their results."""

    process: ForkServerProcess
    pipe: Connection


_pool: list[Rank] = []  # rank 0, rank 1, ...: a job of two takes the first two


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout_s: float = 120.0,
    fresh: bool = False,
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a job, and return what each returned, in rank order.

    :param function: importable by name; it makes its process group itself, as a command does, and destroys it
    :param fresh: start ranks for this call alone. Needed by a function that changes its process for good: one that patches
        without undoing it, starts threads that stay, or uses a GPU
    :raises AssertionError: with the rank's traceback if one failed, naming the ranks that did not end in time, or saying what
        the function left behind in a rank of the pool
    """
    if fresh:
        with _fresh(world_size) as ranks:
            return _run(ranks, function, arguments, range(world_size), timeout_s, fresh=True)
    _pool.extend(_start() for _ in range(len(_pool), world_size))
    try:
        return _run(_pool[:world_size], function, arguments, range(world_size), timeout_s)
    except BaseException:
        close_pool()
        raise


def run_in_group(function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """:func:`run_ranks` of a function that is called within a process group."""
    return run_ranks(_in_group, world_size, function, arguments, timeout_s=timeout_s)


def _in_group(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with process_group(timeout_s=60):
        return function(*arguments)


def run_with_victim(
    function: Callable[..., Any], world_size: int, victim: int, *arguments: Any, timeout_s: float = 60.0
) -> dict[int, Any]:
    """Call ``function(victim, *arguments)`` on every rank of a new job; what each but the victim returned, by rank.

    :param function: importable by name; on the victim it ends or stops its own process. All are killed afterwards.
    :raises AssertionError: with a survivor's traceback if one failed, or naming those that did not end in time
    """
    survivors = [rank for rank in range(world_size) if rank != victim]
    with _fresh(world_size) as ranks:
        results = _run(ranks, function, (victim, *arguments), survivors, timeout_s, fresh=True)
    return dict(zip(survivors, results, strict=True))


def run_forked(
    module: str, *arguments: str | Path, world_size: int = 0, timeout_s: float = 120.0
) -> list[subprocess.CompletedProcess[str]]:
    """``python -m MODULE ARGUMENTS`` on every rank of a job, in fresh processes that have torch imported already.

    :param world_size: 0 for one process of no job
    :return: what each rank printed, and its exit status
    """
    with _fresh(world_size or 1) as ranks:
        given = (module, list(map(str, arguments)))
        awaited = range(len(ranks))
        return _run(ranks, _main, given, awaited, timeout_s, fresh=True, alone=world_size == 0)


def _main(module: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    # The command's own ranks are forked from the server that this process comes from, not from another one.
    for place in (forkserver, forkserver._forkserver):
        vars(place)["ensure_running"] = lambda: None
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            load_command(module, *arguments)()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(sys.argv, status, out.getvalue(), err.getvalue())


def pool_pids() -> set[int]:
    """The processes that wait for the next function."""
    return {rank.process.pid or 0 for rank in _pool}


def close_pool() -> None:
    """Kill the shared ranks; the next test that wants some starts them anew."""
    _end(_pool)
    _pool.clear()


atexit.register(close_pool)


def kill(processes: Sequence[ForkServerProcess]) -> None:
    """SIGKILL ranks and everything below them, and wait until they have ended."""
    for process in processes:
        kill_tree(process.pid or 0)
        process.join()


@contextlib.contextmanager
def forked(
    environments: Sequence[dict[str, str]], function: Callable[..., None], *arguments: Any
) -> Iterator[list[ForkServerProcess]]:
    """Processes that call ``function(*arguments)``, one in each of these environments, for a test that stops or kills them.

    :param function: importable by name; all that is left of it is killed at the end of the block
    """
    given = (function, arguments)
    processes: list[ForkServerProcess] = [
        FORK_SERVER.Process(target=_call, args=({**os.environ, **own}, *given)) for own in environments
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        kill([process for process in processes if process.pid])


def _call(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    take_environment(environment)
    function(*arguments)


def kill_tree(pid: int) -> None:
    """SIGKILL a process and everything below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (*parent.children(recursive=True), parent):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def _fresh(world_size: int) -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    try:
        ranks.extend(_start() for _ in range(world_size))
        yield ranks
    finally:
        _end(ranks)


def _start() -> Rank:
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()
    return Rank(process, ours)


def _end(ranks: Sequence[Rank]) -> None:
    kill([rank.process for rank in ranks])
    for rank in ranks:
        rank.pipe.close()


def _run(
    ranks: Sequence[Rank],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    awaited: Iterable[int],
    timeout_s: float,
    fresh: bool = False,
    alone: bool = False,
) -> list[Any]:
    """The results of the ranks that are awaited, in their order."""
    with contextlib.ExitStack() as stack:
        environments: list[dict[str, str]] = [{}] if alone else stack.enter_context(rendezvous(len(ranks)))
        for rank, environment in zip(ranks, environments, strict=True):
            rank.pipe.send_bytes(pickle.dumps((fresh, {**os.environ, **environment}, os.getcwd(), function, arguments)))
        return list(_collect(ranks, awaited, timeout_s).values())


def _collect(ranks: Sequence[Rank], awaited: Iterable[int], timeout_s: float) -> dict[int, Any]:
    results: dict[int, Any] = dict.fromkeys(awaited)
    pipes: dict[Any, int] = {ranks[number].pipe: number for number in results}
    deadline = time.monotonic() + timeout_s
    while pipes:
        ready = wait(pipes, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {list(pipes.values())} did not end within {timeout_s} s"
        for pipe in ready:
            number = pipes.pop(pipe)
            try:
                failure, left, result = pickle.loads(ranks[number].pipe.recv_bytes())
            except (EOFError, OSError):
                raise AssertionError(f"rank {number} ended without a result") from None
            assert failure is None, f"rank {number} failed:\n{failure}"
            assert not left, f"rank {number} was left with {left}: undo that, or call run_ranks with fresh=True"
            results[number] = pickle.loads(result)
    return results


def _serve(pipe: Connection) -> None:
    """A rank's life: one function after another, until the tests end."""
    # The start method of loader workers, as on a command line. This process was started otherwise.
    multiprocessing.set_start_method("fork", force=True)
    gc.freeze()  # torch's objects are so many that looking through all of them takes 0.2 s, which each job would do
    fresh = False
    while not fresh:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        failure, result, left = None, b"", []
        try:
            fresh, environment, folder, function, arguments = pickle.loads(message)
            before = ProcessState()
            take_environment(environment)
            os.chdir(folder)
            result = pickle.dumps(function(*arguments))
            if not fresh:
                left = before.restore()
        except BaseException:
            failure = traceback.format_exc()
        pipe.send_bytes(pickle.dumps((failure, left, result)))
