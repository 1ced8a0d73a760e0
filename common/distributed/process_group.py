"""A rank's place in the job: the process group, the device, and how all ranks leave together.

``torchrun`` starts one process per device and tells each its place through the environment (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). :func:`process_group` turns that into a :class:`DistEnv`; without torchrun it
makes a group of one, so that one process and many share every line of code.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import gc
import logging
import os
import signal
import socket
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

# DDP imports this module when it is first constructed. Its functions have the default group, as it is then, for a default
# argument, and would keep it and its threads alive past destroy_process_group: a gloo thread that gives back a tensor while
# Python is shutting down aborts the process. Imported now, it finds no group.
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from common.distributed.store_prefix import store_of_this_attempt
from common.errors import UsageError
from common.reporting.machine import usable_cores
from common.resilience.fork_safety import rest_before_forks
from common.resilience.signal_redelivery import keep_stops
from common.resilience.stop_request import SIGNALS

logger = logging.getLogger(__name__)

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
NO_GROUP = "none"


@dataclass(frozen=True)
class DistEnv:
    """Where this process stands in the job.

    :param rank: among all processes, from 0; :param local_rank: among this node's
    :param world_size: processes in the job; :param local_world_size: on this node
    :param device: the one that is this rank's own
    :param backend: ``"gloo"`` or ``"nccl"``; ``"none"`` for a process that has joined no group (:meth:`alone`)
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    host: str

    @classmethod
    def alone(cls, device: torch.device) -> DistEnv:
        """The place of a process that needs no group, since there is no other: what is written for ranks runs there too."""
        return cls(0, 0, 1, 1, device, NO_GROUP, socket.gethostname())

    @property
    def share_of_cores(self) -> int:
        """CPU threads for this rank when the node's ranks share its usable cores."""
        return max(1, usable_cores() // self.local_world_size)

    @property
    def nccl_device(self) -> torch.device | None:
        """The ``device_id`` of ``init_process_group``: bound to it, NCCL need not guess the GPU at its first collective."""
        return self.device if self.backend == "nccl" else None

    @property
    def is_main(self) -> bool:
        """Rank 0: the one that writes and speaks for all."""
        return self.rank == 0

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that may fail on some ranks alone (a file that one node lacks); if it fails on one, it does on all.

        Without this, the rank that failed leaves, and the others wait for it in their next collective. It is also a
        barrier: nobody passes its end before everybody has reached it.

        :raises UsageError: on every rank, the one of the lowest rank that met one, or had trouble with a file or a disk. Any
            other error is the program's, and the rank's alone
        """
        if self.backend == NO_GROUP:
            yield
            return
        user_error = None
        try:
            yield
        except UsageError as error:
            user_error = str(error)
        except OSError as error:
            if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            user_error = f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"
        mistakes: list[str | None] = [None] * self.world_size
        dist.all_gather_object(mistakes, user_error)
        for rank, text in enumerate(mistakes):
            if text is not None:
                shared = UsageError(text if rank == 0 else f"[rank {rank}] {text}")
                shared.seen_by_all = True
                raise shared

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor of any shape, in place, by sum; returns it."""
        if self.backend != NO_GROUP:
            dist.all_reduce(values)
        return values


@contextlib.contextmanager
def process_group(
    device: str = "auto", backend: str = "auto", timeout_s: float = 600.0, threads: int = 0
) -> Iterator[DistEnv]:
    """Join the job, and leave it cleanly on success, on an error, on Ctrl-C and on SIGTERM.

    :param device: of :data:`DEVICES`; ``auto`` takes CUDA where there is any
    :param backend: of :data:`BACKENDS`; ``auto`` takes NCCL on CUDA and gloo on the CPU
    :param timeout_s: how long a rank waits for the others to come, and a collective for what they send
    :param threads: for compute on the CPU, per rank; 0 shares the usable cores among the node's ranks
    :raises UsageError: for half an environment, a port in use, ranks that do not come, NCCL without CUDA, or more ranks
        than GPUs
    """
    env = find_dist_env(device, backend)
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    torch.set_num_threads(threads or env.share_of_cores)
    with clean_exit(env):
        with rendezvous_errors(env):
            dist.init_process_group(
                env.backend,
                store=rendezvous_store(env, timeout_s),
                rank=env.rank,
                world_size=env.world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=env.nccl_device,
            )
        yield env


@contextlib.contextmanager
def clean_exit(env: DistEnv) -> Iterator[None]:
    """A block in which the process joins a group. It leaves the group on success, on an error, on Ctrl-C and on SIGTERM."""
    rest_before_forks()
    with stop_signals():
        failed = True
        try:
            yield
            failed = False
        except (UsageError, SystemExit):
            failed = False
            raise
        finally:
            gc.collect()  # DDP modules sit in reference cycles, and the group's threads end with its last reference
            # After a failure, NCCL would wait here for ranks that are stuck in a collective. The process's end frees them.
            if dist.is_initialized() and not (failed and env.backend == "nccl"):
                dist.destroy_process_group()


def require_alone(program: str) -> None:
    """:raises UsageError: in a job of ranks, for a program that is one process or starts its own"""
    if "RANK" in os.environ:
        raise UsageError(f"{program} is started once, and not by torchrun: start it with python -m, or unset RANK")


def find_dist_env(device: str = "auto", backend: str = "auto", environment: Mapping[str, str] | None = None) -> DistEnv:
    """Read a rank's place from torchrun's variables; without any of them, the only rank of a job of one.

    :param environment: the process's own when None
    :raises UsageError: as :func:`process_group`
    """
    environment = os.environ if environment is None else environment
    given = [name for name in TORCHRUN_VARIABLES if name in environment]
    missing = [name for name in TORCHRUN_VARIABLES if name not in environment]
    if not given:
        environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    elif missing:
        raise UsageError(
            f"{', '.join(given)} set, but not {', '.join(missing)}: start with torchrun, which sets them all, or unset them"
        )
    numbers = {}
    for name in (*TORCHRUN_VARIABLES[:4], *(["MASTER_PORT"] if given else [])):
        if not environment[name].isdecimal():
            raise UsageError(f"{name}={environment[name]!r} is not a whole number: let torchrun set it")
        numbers[name] = int(environment[name])
    for index, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[index] >= numbers[size]:
            raise UsageError(f"{index}={numbers[index]} must be below {size}={numbers[size]}: let torchrun set both")

    chosen = _choose_device(device, backend, numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"])
    return DistEnv(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        device=chosen,
        backend=("nccl" if chosen.type == "cuda" else "gloo") if backend == "auto" else backend,
        host=socket.gethostname(),
    )


def _choose_device(device: str, backend: str, local_rank: int, local_world_size: int) -> torch.device:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and (backend == "gloo" or gpus == 0)):
        if backend == "nccl":
            found = "no CUDA device is usable here" if gpus == 0 else "--device cpu was asked for"
            raise UsageError(f"--backend nccl needs CUDA, but {found}: use --backend gloo")
        return torch.device("cpu")
    if gpus == 0:
        raise UsageError("--device cuda, but no CUDA device is usable here: use --device cpu, or check nvidia-smi")
    if local_world_size > gpus:
        raise UsageError(
            f"{local_world_size} ranks on this node, but {gpus} GPU{'s' * (gpus > 1)}: "
            f"start with --nproc_per_node={gpus}, or train with --device cpu"
        )
    return torch.device("cuda", local_rank)


def rendezvous_store(env: DistEnv, timeout_s: float) -> Store:
    """The store in which the ranks find each other's addresses: torchrun holds it at MASTER_ADDR and MASTER_PORT.

    :param timeout_s: seconds to wait for the other ranks
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    store: Store
    if "RANK" not in os.environ:  # a group of one needs no rendezvous, and so no port
        store = dist.HashStore()  # type: ignore[attr-defined]
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = store_of_this_attempt(env.rank, env.world_size, timeout)
    else:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    return store


@contextlib.contextmanager
def rendezvous_errors(env: DistEnv) -> Iterator[None]:
    """A block that joins the process group.

    :raises UsageError: when a rank does not come in time, the port is in use, or the address cannot be reached
    """
    try:
        yield
    except dist.DistStoreError as error:  # the others did not come in time
        raise UsageError(f"not all {env.world_size} ranks came within --timeout: {_first_line(error)}") from error
    except RuntimeError as error:  # DistNetworkError, in newer versions
        if "RANK" not in os.environ:
            raise
        address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"MASTER_PORT {port} is in use on {address}: set another, or let torchrun choose a free one"
            ) from error
        raise UsageError(f"no rendezvous at MASTER_ADDR {address}, MASTER_PORT {port}: {_first_line(error)}") from error


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGUSR1 unwind the stack as ``SystemExit``, so that workers, files and a group are closed.

    A second Ctrl-C (torchrun may pass on one that the terminal sent too) does not interrupt the unwinding; a second SIGTERM
    ends the process at once. Loader workers get torchrun's signals too, and their end is no news then.
    """

    owner = os.getpid()

    def stop(number: int, frame: types.FrameType | None) -> None:
        if os.getpid() != owner:  # a loader worker, forked with this handler: its rank ends it
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        logger.warning("stopped by %s", signal.Signals(number).name)
        raise SystemExit(128 + number)

    def stopped_by(error: BaseException) -> int | None:
        if os.getpid() != owner or not isinstance(error, SystemExit) or not isinstance(error.code, int):
            return None
        signal.signal(error.code - 128, stop)  # which had taken itself away
        return error.code - 128

    before = {number: signal.signal(number, stop) for number in SIGNALS}
    try:
        with keep_stops(stopped_by):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
