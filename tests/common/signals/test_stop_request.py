"""common/signals/stop_request.py: a signal is a request, a second one an end, and a loader worker's are its own; in real processes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from common.signals import stop_request as stopping
from common.signals.stop_request import (
    INTERRUPTED,
    REQUEUE,
    SIGNALS,
    StopRequest,
    exit_status,
    stop_signals,
    to_be_requeued,
    unwrapped_stops,
)
from tests.support.harm.kill import is_alive
from tests.support.launch import FORK_SERVER, REPOSITORY, kill, wait_until

PATIENCE_S = 60.0


@contextlib.contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """``function(pipe, *arguments)`` in a process of its own, and our end of the pipe; killed at the end of the block."""
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=function, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        kill([process])
        ours.close()


def heard(pipe: Connection) -> Any:
    """The line that the process sends next."""
    assert pipe.poll(PATIENCE_S), "nothing was heard"
    return pipe.recv()


def stops_at_leisure(pipe: Connection) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    request = StopRequest()
    with request.listening() as stop:
        assert stop is request
        pipe.send(bool(stop))
        wait_until(lambda: bool(stop))
    restored = [signal.getsignal(number) for number in SIGNALS] == handlers and signal.set_wakeup_fd(-1) == -1
    pipe.send((stop.number, restored))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_request_and_the_handlers_are_as_before(number: int) -> None:
    with running(stops_at_leisure) as (process, pipe):
        assert heard(pipe) is False
        os.kill(process.pid or 0, number)
        assert heard(pipe) == (number, True)
        process.join(PATIENCE_S)
        assert process.exitcode == 0


def asked_twice(pipe: Connection) -> None:
    stopping.SAME_REQUEST_S = PATIENCE_S
    with StopRequest().listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: bool(stop))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
    pipe.send(stop.number)


def test_signals_that_follow_at_once_are_the_same_request() -> None:
    with running(asked_twice) as (process, pipe):
        assert heard(pipe) == signal.SIGINT
        process.join(PATIENCE_S)
        assert process.exitcode == 0


def waits_in_c(pipe: Connection) -> None:
    """Its main thread asks for a mutex that it holds: no signal interrupts that, and Python runs no handler."""
    stopping.SAME_REQUEST_S = 0.2
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    mutex = ctypes.create_string_buffer(64)  # zeros are PTHREAD_MUTEX_INITIALIZER
    library = ctypes.CDLL(None)  # which lets go of the interpreter's lock in each call
    with StopRequest().listening():
        child.start()
        library.pthread_mutex_lock(mutex)
        pipe.send(child.pid)
        library.pthread_mutex_lock(mutex)


@pytest.mark.parametrize(
    ("numbers", "status"), [((signal.SIGTERM, signal.SIGUSR1), REQUEUE), ((signal.SIGINT, signal.SIGINT), INTERRUPTED)]
)
def test_a_second_signal_later_ends_a_process_that_waits_in_c(numbers: tuple[int, int], status: int) -> None:
    with running(waits_in_c) as (process, pipe):
        child = psutil.Process(heard(pipe))
        os.kill(process.pid or 0, numbers[0])
        time.sleep(0.5)
        assert process.is_alive()
        wait_until(lambda: ended_by(process, numbers[1]))
        assert process.exitcode == status
        wait_until(lambda: not is_alive(child))


def ended_by(process: BaseProcess, number: int) -> bool:
    """Whether another signal has ended it. (On a busy machine, one may be read together with the first.)"""
    if process.is_alive():
        os.kill(process.pid or 0, number)
    process.join(0.5)
    return process.exitcode is not None


def has_a_worker(pipe: Connection) -> None:
    with StopRequest().listening() as stop:
        worker = multiprocessing.get_context("fork").Process(target=works, args=(pipe,))
        worker.start()
        pipe.recv()  # all signals to the worker have been sent
        pipe.send((stop.number, worker.is_alive()))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: bool(stop))
    pipe.send((stop.number, worker.is_alive()))  # the worker's copies of the descriptors delay nothing
    worker.kill()
    worker.join()


def works(pipe: Connection) -> None:
    taken: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: taken.append(number))
    pipe.send(os.getpid())
    wait_until(lambda: len(taken) == len(SIGNALS))  # of which none waits to be written anywhere
    pipe.send(sorted(taken))
    time.sleep(600)


def test_a_worker_keeps_its_signals_to_itself_and_its_rank_may_leave_before_it() -> None:
    with running(has_a_worker) as (process, pipe):
        worker = heard(pipe)
        for number in SIGNALS:
            os.kill(worker, number)
        assert heard(pipe) == sorted(SIGNALS)
        pipe.send(None)
        assert heard(pipe) == (None, True)
        assert heard(pipe) == (signal.SIGTERM, True)
        process.join(PATIENCE_S)
        assert process.exitcode == 0


def test_only_a_person_s_ctrl_c_ends_a_job_for_good() -> None:
    assert exit_status([signal.SIGINT]) == exit_status([None, signal.SIGINT, signal.SIGINT]) == INTERRUPTED
    for numbers in ([signal.SIGTERM], [signal.SIGUSR1, None], [signal.SIGINT, signal.SIGTERM]):
        assert exit_status(numbers) == REQUEUE


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (128 + signal.SIGTERM, REQUEUE),
        (128 + signal.SIGINT, INTERRUPTED),
        (2, 2),
        (None, None),
        ("a message", "a message"),
    ],
)
def test_a_signal_outside_the_training_gives_the_same_status(code: Any, status: Any) -> None:
    with pytest.raises(SystemExit) as end, to_be_requeued():
        raise SystemExit(code)
    assert end.value.code == status


def stopped_while_a_class_is_made() -> None:
    class Descriptor:
        def __set_name__(self, owner: type, name: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    try:

        class Owner:
            field = Descriptor()

    except SystemExit as stop:  # Python 3.12 and later
        raise RuntimeError("wrapped") from stop


def test_a_stop_that_became_another_exception_is_a_stop() -> None:
    """As the random signals found: one that came while torch imported a dataclass."""
    with pytest.raises(SystemExit, match="143"), stop_signals(), unwrapped_stops():
        stopped_while_a_class_is_made()


@pytest.mark.parametrize("behind", [SystemExit(2), ValueError("not a stop")])
def test_other_exceptions_stay(behind: BaseException) -> None:
    """An exception that does not come from a stop signal passes unchanged."""
    with pytest.raises(RuntimeError, match="first"), unwrapped_stops():
        raise RuntimeError("first") from behind


def waits_for_ever_inside_cpp(ready: Connection, requeued: bool) -> None:
    stopping.STUCK_S = 0.5
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    stopping.requeued_command = "ddp.train"
    sys.orig_argv = ["python", "-m", "ddp.train" if requeued else "ddp.evaluate"]
    with stop_signals():
        ready.send(None)
        store.get("what no rank sets")


@pytest.mark.parametrize(
    ("number", "requeued", "status"),
    [(signal.SIGTERM, False, 143), (signal.SIGHUP, True, 75)],
)
def test_a_process_that_waits_inside_cpp_ends_all_the_same(number: int, requeued: bool, status: int) -> None:
    """A signal ends a process that waits inside C++.

    A rank that waits for another would hear the signal only when that comes, or after the timeout.

    Claim (ddp/resilience/README.md): a signal ends a rank that waits inside C++.
    """
    with running(waits_for_ever_inside_cpp, requeued) as (process, pipe):
        heard(pipe)
        time.sleep(0.2)  # until it waits
        os.kill(process.pid or 0, number)
        process.join(PATIENCE_S)
        assert process.exitcode == status


@pytest.mark.parametrize(
    ("block", "wait_s", "line"),
    [
        ("with StopRequest().listening():", 1.2, "stopped at once by a second SIGINT"),
        ("while True:", 0.0, "stopped by SIGINT"),
    ],
)
def test_a_second_ctrl_c_ends_in_a_line(block: str, wait_s: float, line: str) -> None:
    """The second is sent later, or while the first is told."""
    program = f"""
import common.command_line.cli, os, signal, time
from common.signals.stop_request import StopRequest
common.command_line.cli.finalize_silently = lambda: os.kill(os.getpid(), signal.SIGINT)
@common.command_line.cli.command
def main():
    {block}
        print("ready", flush=True)
        time.sleep(60)
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(wait_s)
        if wait_s:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (INTERRUPTED, f"{line}\n")
