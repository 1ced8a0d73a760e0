"""A worker group: the ranks of one job, which stay alive and run one call of the main process after another.

Benchmarks need it: jobs that are compared take turns within one command, and their start must not be part of a timing::

    with WorkerGroup(2, Service, "argument", threads=1) as ranks:
        ranks.call("run", 10)  # service.run(10) on both: [result of rank 0, result of rank 1]

It is for benchmarks on one machine. To start a training, use torchrun.

The processes are forked from multiprocessing's fork server, which has imported torch but never used it. A fork takes a
fraction of a second, and CUDA is first used on the ranks themselves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, parent_process, resource_sharer, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.errors import UsageError
from common.signals import stop_request
from ddp.rendezvous.process_group import process_group

END_S = 5.0  # for a rank to leave its group
ENDLESS_S = 1e6  # a call may take as long as it takes
ECHO_S = 0.5  # until the death of a rank is seen; other ranks may report their broken connections before that

_context = torch.multiprocessing.get_context("forkserver")
# The first, if it is installed, lets the fork server find our packages before the user's.
_PRELOADED = ("raw_ddp_command", "torch", "ddp.rendezvous.worker_group")
_context.set_forkserver_preload(list(_PRELOADED))


def preload(*modules: str) -> None:
    """Let the fork server import more, once instead of on each rank. It must come before the first group of this process."""
    _context.set_forkserver_preload([*_PRELOADED, *modules])


class RankDied(RuntimeError):
    """The process of a rank has ended in a call; says how."""


class WorkerGroup:
    """A job of ``world_size`` processes, each with a process group and a service of its own; to be closed.

    CPU tensors that are passed, in either direction, are moved to shared memory and stay shared. The ranks are daemons, so
    they cannot have loader workers. When the main process ends, even if it is killed, they end too.

    :param world_size: number of ranks
    :param build: importable by name; ``build(env, *arguments)`` makes a rank's service, within its process group
    :param arguments: of ``build``
    :param device: see :func:`ddp.rendezvous.process_group.process_group`, also for ``backend`` and ``threads``
    :param backend: one of :data:`common.distributed.BACKENDS`
    :param threads: CPU threads per rank
    :param timeout_s: for the start and for each collective
    :raises UsageError: with the message of a rank's ``UsageError``
    :raises RuntimeError: with the traceback of any other error on a rank, or with the way in which its process ended. After an
        error, here or from a call, all ranks have ended, also those that waited for the failed one.
    """

    def __init__(
        self,
        world_size: int,
        build: Callable[..., Any],
        *arguments: Any,
        device: str = "cpu",
        backend: str = "auto",
        threads: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._doing: str | None = "build"
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._rendezvous = contextlib.ExitStack()
        try:
            environments = self._rendezvous.enter_context(rendezvous(world_size))
            with _ctrl_c_afterwards():
                for rank, environment in enumerate(environments):
                    ours, theirs = _context.Pipe()
                    group = (device, backend, timeout_s, threads)
                    process = _context.Process(
                        target=_rank,
                        args=(theirs, {**os.environ, **environment}, group, build, arguments),
                        name=f"rank-{rank}",
                        daemon=True,
                    )
                    with theirs:
                        process.start()
                    self._ranks.append((process, ours))
        except BaseException:
            self._kill()
            raise
        self.finish()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._kill()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Run ``service.method(*arguments)`` on every rank at once; returns the results in rank order."""
        self.start(method, *arguments)
        return self.finish()

    def start(self, method: str, *arguments: Any) -> None:
        """Begin a call; the main process may do something else until :meth:`finish`."""
        if not self._ranks:
            raise RuntimeError(f"{method}: these ranks have ended")
        # One message per rank: a handle to shared memory can be received once.
        messages = [ForkingPickler.dumps((method, arguments)) for _ in self._ranks]
        self._doing = method
        for (_, pipe), message in zip(self._ranks, messages, strict=True):
            with contextlib.suppress(OSError):  # the rank is dead; finish reports that
                pipe.send_bytes(message)

    def finish(self) -> list[Any]:
        """Wait for the call that was started; returns the results in rank order."""
        results = self._results(ENDLESS_S, lambda _: False, ECHO_S)
        errors = [result for result in results.values() if isinstance(result, Exception)]
        if errors:
            errors.sort(key=lambda error: not isinstance(error, RankDied))  # a death is the cause of what others report
            results.clear()  # no frame may hold the error that is raised: the cycle would keep the caller's tensors
            raise errors.pop(0)
        return [results[rank] for rank in sorted(results)]

    def finish_within(self, timeout_s: float, failed: Callable[[Any], bool], grace_s: float) -> dict[int, Any]:
        """Wait for a call that was started and may fail or hang on some ranks. Unless it went well on all, all ranks end.

        :param timeout_s: time for the call
        :param failed: whether a result is a failure; the other ranks may be waiting for that one, in vain
        :param grace_s: time for the other ranks after the first failure
        :returns: the results of the ranks that answered, by rank; a RuntimeError for a rank that died or raised something
        :raises UsageError: with the message of a rank's ``UsageError``
        """
        results = self._results(timeout_s, failed, grace_s)
        for result in results.values():
            if isinstance(result, UsageError):
                raise result
        return dict(sorted(results.items()))

    def _results(self, timeout_s: float, failed: Callable[[Any], bool], grace_s: float) -> dict[int, Any]:
        """The ranks' answers or exceptions, in the order in which they come. Unless the call went well on all, all ranks end."""
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        well = False
        try:
            pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
            pipe: Any
            while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
                for pipe in ready:
                    rank = pending.pop(pipe)
                    results[rank] = self._result_or_error(rank, pipe)
                    if isinstance(results[rank], Exception) or failed(results[rank]):
                        deadline = min(deadline, time.monotonic() + grace_s)
            well = not pending and not any(isinstance(r, Exception) or failed(r) for r in results.values())
        finally:
            if not well:
                self._kill()
        self._doing = None
        return results

    def close(self) -> None:
        """End the ranks: ask them to leave; kill those that do not, or are still in a call."""
        try:
            if not self._doing:
                for _, pipe in self._ranks:
                    with contextlib.suppress(OSError):
                        pipe.send(None)
                deadline = time.monotonic() + END_S
                for process, _ in self._ranks:
                    process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self._kill()

    def _result_or_error(self, rank: int, pipe: Connection) -> Any:
        """The answer of one rank; an exception if it failed."""
        try:
            user_error, trace, result = pipe.recv()
        except (EOFError, OSError):
            return self._death(rank)
        if user_error is not None:
            return UsageError(user_error)
        return result if trace is None else RuntimeError(f"{self._named(rank)} failed in {self._doing}:\n{trace}")

    def _death(self, rank: int) -> RankDied:
        process, _ = self._ranks[rank]
        process.join(END_S)
        code = process.exitcode
        end = f"ended with exit status {code}"
        if code is not None and code < 0:
            end = f"died of {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            end += " (the kernel does this when memory runs out: see dmesg)"
        return RankDied(f"{self._named(rank)} (pid {process.pid}) {end} in {self._doing}")

    def _named(self, rank: int) -> str:
        return f"rank {rank} of {len(self._ranks)}"

    def _kill(self) -> None:
        for process, _ in self._ranks:
            process.kill()
        for process, pipe in self._ranks:
            process.join()
            process.close()
            pipe.close()
        self._ranks.clear()
        if self._doing:
            resource_sharer.stop()  # it holds shared memory that the killed ranks did not receive
            self._doing = None
        self._rendezvous.close()


@contextlib.contextmanager
def rendezvous(world_size: int) -> Iterator[list[dict[str, str]]]:
    """Hold the store of a new job; yields the environment of each rank, as torchrun would set it.

    :param world_size: number of ranks
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process serves the store, as torchrun's agent does
        }
        for rank in range(world_size)
    ]


@contextlib.contextmanager
def _ctrl_c_afterwards() -> Iterator[None]:
    """Delay Ctrl-C until the ranks have started: it must not interrupt the fork server's imports, or orphan a rank.

    All processes that this fork server starts begin with SIGINT blocked, a program's own ones too.
    """
    resource_tracker.ensure_running()  # first: its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_environment(environment: dict[str, str]) -> None:
    """In a forked process: take this environment in the place of the fork server's, which may be older than the main process's."""
    os.environ.clear()
    os.environ.update(environment)


def _rank(pipe: Connection, environment: dict[str, str], group: Any, build: Callable[..., Any], arguments: Any) -> None:
    """The main function of a rank. Its answers are (a UsageError's message, any other error's traceback, the result)."""
    # A terminal sends SIGINT to all processes; the main process ends the ranks.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_main_process, daemon=True).start()
    take_environment(environment)
    stop_request.logger.setLevel(logging.ERROR)  # the main process logs a stop
    # The pipe is closed before the group is left: the main process sees that before the other ranks report an error.
    with _reported(pipe), process_group(*group) as env, pipe, _reported(pipe):
        _serve(pipe, build, env, *arguments)


def _serve(pipe: Connection, build: Callable[..., Any], *arguments: Any) -> None:
    service = build(*arguments)  # a local variable: a DDP module must not outlive its group
    pipe.send((None, None, None))
    while (call := pipe.recv()) is not None:
        method, call_arguments = call
        pipe.send((None, None, getattr(service, method)(*call_arguments)))


@contextlib.contextmanager
def _reported(pipe: Connection) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if pipe.closed:
            raise
        user_error = str(error) if isinstance(error, UsageError) else None
        with contextlib.suppress(EOFError, OSError):
            pipe.send((user_error, traceback.format_exc(), None))
            pipe.recv()  # wait to be killed: if this rank left, the others would fail too


def _end_with_main_process() -> None:
    """End this process with the main process, even while the main thread is busy or hangs in a collective."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
