"""Real ranks for tests: processes with a process group of their own, and commands as a user types them.

Ranks are forked from a server process that has imported torch but never used it, so a job of four starts in a fraction of
a second. They find each other as torchrun's workers do, through a store that this process holds. Whatever happens, nothing
that a test starts outlives it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil

from common.distributed.worker_group import rendezvous

REPOSITORY = Path(__file__).parent.parent
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # the tests of gloo mean the CPU, also where there is one GPU for two ranks

FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["ddp.train", "common.distributed.worker_group"])


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0, gpus: bool = False
) -> list[Any]:
    """Call ``function(*arguments)`` on every rank of a new job, and return what each returned, in rank order.

    :param function: importable by name; it makes its process group itself, as a command does
    :param gpus: whether the ranks may see the machine's GPUs
    :raises AssertionError: with the rank's traceback if one failed, or naming the ranks that did not end in time
    """
    with _ranks(function, world_size, arguments, {} if gpus else NO_GPUS) as (processes, pipes):
        results = _collect(pipes, range(world_size), timeout_s)
        for process in processes:
            process.join(timeout=5)
        return list(results.values())


def run_with_victim(
    function: Callable[..., Any], world_size: int, victim: int, *arguments: Any, timeout_s: float = 60.0
) -> dict[int, Any]:
    """Call ``function(victim, *arguments)`` on every rank of a new job; what each but the victim returned, by rank.

    :param function: importable by name; on the victim it ends or stops its own process. All are killed afterwards.
    :raises AssertionError: with a survivor's traceback if one failed, or naming those that did not end in time
    """
    with _ranks(function, world_size, (victim, *arguments), NO_GPUS) as (_, pipes):
        return _collect(pipes, [rank for rank in range(world_size) if rank != victim], timeout_s)


@contextlib.contextmanager
def _ranks(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], variables: dict[str, str]
) -> Iterator[tuple[list[ForkServerProcess], list[Connection]]]:
    """The ranks of a new job, and the pipes through which each sends its result; killed at the end of the block."""
    processes, pipes = [], []
    with rendezvous(world_size) as environments:
        for environment in environments:
            receiver, sender = FORK_SERVER.Pipe(duplex=False)
            process = FORK_SERVER.Process(target=_rank, args=(sender, environment | variables, function, arguments))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            yield processes, pipes
        finally:
            kill(processes)
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], ranks: Iterable[int], timeout_s: float) -> dict[int, Any]:
    """The results of these ranks, in their order."""
    results: dict[int, Any] = dict.fromkeys(ranks)
    awaited: dict[Any, int] = {pipes[rank]: rank for rank in results}
    deadline = time.monotonic() + timeout_s
    while awaited:
        ready = wait(awaited, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {list(awaited.values())} did not end within {timeout_s} s"
        for pipe in ready:
            rank = awaited.pop(pipe)
            try:
                failure, results[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} ended without a result") from None
            assert failure is None, f"rank {rank} failed:\n{failure}"
    return results


def _rank(sender: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    os.environ.update(environment)
    try:
        result, failure = function(*arguments), None
    except BaseException:
        result, failure = None, traceback.format_exc()
    sender.send_bytes(pickle.dumps((failure, result)))


def kill(processes: Sequence[ForkServerProcess]) -> None:
    """SIGKILL ranks and everything below them, and wait until they have ended."""
    for process in processes:
        kill_tree(process.pid or 0)
        process.join()


def run_command(
    *arguments: str, timeout_s: float = 120.0, env: dict[str, str] | None = None, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ARGUMENTS`` as a user would, outside any job, and wait for it."""
    with start_command(*arguments, env=env, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            out, err = process.communicate()
            raise AssertionError(f"{arguments} did not end within {timeout_s} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def run_torchrun(
    ranks: int, *arguments: str, timeout_s: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc_per_node=RANKS -m ARGUMENTS``."""
    flags = ("torch.distributed.run", f"--nproc_per_node={ranks}", "-m")
    return run_command(*flags, *arguments, timeout_s=timeout_s, env=env)


@contextlib.contextmanager
def start_command(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path = REPOSITORY, output: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``python -m ARGUMENTS`` in a session of its own; killed, with all its children, at the end of the block.

    :param output: a file for what it prints, where nobody reads that meanwhile; otherwise there are pipes
    """
    with contextlib.ExitStack() as streams:
        file = None if output is None else streams.enter_context(open(output, "w"))
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=cwd,
            env=clean_environment() | (env or {}),
            stdout=file or subprocess.PIPE,
            stderr=file or subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                streams.enter_context(stream)
        try:
            yield process
        finally:
            kill_tree(process.pid)
            process.wait()


def clean_environment() -> dict[str, str]:
    """This process's environment without GPUs, and without what a surrounding job may have set."""
    from common.distributed.process_group import TORCHRUN_VARIABLES

    return {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES} | NO_GPUS


def kill_tree(pid: int) -> None:
    """SIGKILL a process and everything below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def error_lines(stderr: str) -> list[str]:
    """The lines in which a command says what a person did wrong."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def statuses_by_rank(report: str) -> dict[int, int]:
    """What torchrun's report says that each rank that failed has ended with, negative for a signal. It sends SIGTERM to
    those that live on after the first, each of which may be on its way to its own end."""
    found = re.findall(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+) ", report)
    return {int(rank): int(status) for rank, status in found}


def free_port() -> int:
    """A port in which nobody listens, and which the kernel does not give away by itself meanwhile."""
    lowest_given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, lowest_given_away), 100):
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are all in use")


def ranks_below(pid: int, words: Sequence[str] = ("ddp.train",)) -> list[psutil.Process]:
    """The processes below ``pid`` whose command line has all ``words``."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if all(any(word in part for part in process.cmdline()) for word in words):
                found.append(process)
    return found
