"""Commands as a user types them, in processes of their own. Whatever happens, nothing that a test starts outlives it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.support.ranks import FORK_SERVER as FORK_SERVER
from tests.support.ranks import kill as kill
from tests.support.ranks import kill_tree as kill_tree
from tests.support.ranks import run_forked as run_forked
from tests.support.ranks import run_ranks as run_ranks
from tests.support.ranks import run_with_victim as run_with_victim

REPOSITORY = Path(__file__).parent.parent.parent


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


def run_program(
    program: str, *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    """Run a program of Python, given as its text, outside any job, and wait for it."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    environment = {**clean_environment(), **(env or {})}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def run_torchrun(
    ranks: int, *arguments: str, timeout_s: float = 120.0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``torchrun --nproc_per_node=RANKS -m ARGUMENTS``."""
    flags = ("torch.distributed.run", f"--nproc_per_node={ranks}", "-m")
    return run_command(*flags, *arguments, timeout_s=timeout_s, env=env)


def start_command(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path = REPOSITORY, output: Path | None = None
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """``python -m ARGUMENTS``, as :func:`start_program` starts it."""
    return start_program(sys.executable, "-m", *arguments, env=env, cwd=cwd, output=output)


@contextlib.contextmanager
def start_program(
    *command: str, env: Mapping[str, str] | None = None, cwd: Path = REPOSITORY, output: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command in a session of its own; killed, with all its children, at the end of the block.

    :param output: a file for what it prints; without one, pipes that the caller must read
    """
    with contextlib.ExitStack() as streams:
        file = None if output is None else streams.enter_context(open(output, "w"))
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**clean_environment(), **(env or {})},
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
    """This process's environment without what a surrounding job may have set."""
    from common.launchers import TORCHRUN_VARIABLES

    return {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}


def error_lines(stderr: str) -> list[str]:
    """The lines in which a command says what a person did wrong."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def statuses_by_rank(report: str) -> dict[int, int]:
    """The exit status of each failed rank in torchrun's report, negative for a signal. torchrun sends SIGTERM to
    those that live on after the first, each of which may be on its way to its own end."""
    found = re.findall(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: (-?\d+) ", report)
    return {int(rank): int(status) for rank, status in found}


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll until ``condition()`` is true.

    :raises AssertionError: if it is not in time
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(0.02)


def free_port() -> int:
    """A port on which no process listens, outside the range from which the kernel assigns ports."""
    lowest_given_away = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(10_000, lowest_given_away), 100):
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are all in use")
