"""Which rank this process is, on which device, and how all ranks fail together.

``torchrun`` starts one process per device and describes each through its environment (RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT). :func:`find_dist_env` turns that into a :class:`DistEnv`. The variables
of other launchers have been translated by then (common/launchers.py).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.distributed.agreement import RanksDiffer, describe
from common.errors import UsageError
from common.gpu.devices import count_gpus, gpu_of, why_no_gpu
from common.launchers import TORCHRUN_VARIABLES
from common.machine import usable_cores

logger = logging.getLogger(__name__)

NO_GROUP = "none"


@dataclass(frozen=True)
class DistEnv:
    """This process's rank in the job, and its device.

    :param rank: among all processes of the job, from 0
    :param local_rank: among the processes of this node, from 0
    :param world_size: number of processes in the job
    :param local_world_size: number of processes on this node
    :param device: this rank's own device
    :param backend: ``"gloo"`` or ``"nccl"``; ``"none"`` for a process that has joined no group (:meth:`alone`)
    :param host: this node's name
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
        """A process without a group: code that is written for ranks runs there too."""
        return cls(0, 0, 1, 1, device, NO_GROUP, socket.gethostname())

    @classmethod
    def of_group(cls) -> DistEnv:
        """A rank of the default group, which the caller has made; all count as ranks of one host."""
        rank, ranks, backend = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        return cls(rank, rank, ranks, ranks, device, backend, socket.gethostname())

    @property
    def share_of_cores(self) -> int:
        """CPU threads for this rank when the node's ranks share its usable cores.

        A launcher may have bound each rank to some of them (``torchrun --numa-binding``, srun), which all ranks together do not
        share. Then its own process, the parent of this one, has them all.
        """
        mine = of_node = usable_cores()
        with contextlib.suppress(OSError):
            of_node = max(mine, usable_cores(os.getppid()))
        return max(1, min(mine, of_node // self.local_world_size))

    @property
    def nccl_device(self) -> torch.device | None:
        """The ``device_id`` of ``init_process_group``: bound to it, NCCL need not guess the GPU at its first collective."""
        return self.device if self.backend == "nccl" else None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints for all ranks."""
        return self.rank == 0

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """A block that may fail on some ranks only, because one node lacks a file for example. If it fails on one, it fails on all.

        Without this, the rank that failed would end, and the others would wait for it in their next collective. The end of
        the block is also a barrier: no rank passes it before all ranks have reached it. Without a group, the block raises the
        same errors.

        :raises UsageError: on every rank, the error of the lowest rank that met a ``UsageError``, or could not read or write
            a file. Any other error is a defect of the program, and is raised on its own rank only
        """
        user_error = None
        try:
            yield
        except UsageError as error:
            user_error = str(error)
        except OSError as error:
            if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            user_error = f"{error.filename or 'a file'} cannot be read or written: {error.strerror}"
        user_errors = [user_error] * self.world_size
        if self.backend != NO_GROUP:
            dist.all_gather_object(user_errors, user_error)
        for rank, text in enumerate(user_errors):
            if text is not None:
                shared = UsageError(text if rank == 0 else f"[rank {rank}] {text}")
                shared.seen_by_all = True
                raise shared

    def from_rank_0(self, call: Callable[[], Any]) -> Any:
        """The value that a call has on rank 0, on every rank, where it is pickled. A collective.

        :raises UsageError: on every rank, if the call raises one
        """
        value: list[Any] = [None]
        with self.fail_together():
            if self.is_main:
                value[0] = call()
        dist.broadcast_object_list(value, src=0, device=self.device)
        return value[0]

    def require_same(self, **facts: object) -> None:
        """Compare values over the ranks, as text. A collective.

        :raises UsageError: on every rank, naming what differs, the ranks and their values
        """
        if self.world_size > 1:
            everyone: list[dict[str, str]] = [{}] * self.world_size
            dist.all_gather_object(everyone, {name.replace("_", " "): str(fact) for name, fact in facts.items()})
            if problem := describe(dict(enumerate(everyone))):
                raise RanksDiffer(problem)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce a tensor of any shape, in place, by sum; returns it."""
        if self.backend != NO_GROUP:
            dist.all_reduce(values)
        return values


def require_alone(program: str) -> None:
    """:raises UsageError: in a job of ranks, for a program that is one process or starts its own"""
    if "RANK" in os.environ:
        raise UsageError(f"{program} is started once, and not by torchrun: start it with python -m, or unset RANK")


def find_dist_env(device: str = "auto", backend: str = "auto", environment: Mapping[str, str] = os.environ) -> DistEnv:
    """This process's rank, from torchrun's environment variables; without any of them, the only rank of a job of one.

    :param device: one of :data:`common.distributed.DEVICES`; ``auto`` takes CUDA, and the CPU where it would give two ranks of one
        host the same GPU
    :param backend: one of :data:`common.distributed.BACKENDS`
    :raises UsageError: when only some of torchrun's variables are set, or CUDA is asked for where there is none
    """
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
            raise UsageError(f"{name}={environment[name]!r} is not a whole number of 0 or more: let torchrun set it")
        numbers[name] = int(environment[name])
    if not 0 <= numbers.get("MASTER_PORT", 0) < 2**16:
        raise UsageError(f"MASTER_PORT={numbers['MASTER_PORT']} is no port: use one from 1 to 65535")
    if given and not environment["MASTER_ADDR"].strip():
        raise UsageError("MASTER_ADDR is empty: set it to the address of the host with rank 0, or let torchrun do it")
    for index, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[index] >= numbers[size]:
            raise UsageError(f"{index}={numbers[index]} must be below {size}={numbers[size]}: let torchrun set both")
    if numbers["LOCAL_WORLD_SIZE"] > numbers["WORLD_SIZE"]:
        raise UsageError(
            f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']}, the ranks of this node, is more than all ranks, "
            f"WORLD_SIZE={numbers['WORLD_SIZE']}: let torchrun set both"
        )

    chosen = _choose_device(device, backend, numbers, environment)
    return DistEnv(
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        device=chosen,
        backend=("nccl" if chosen.type == "cuda" else "gloo") if backend == "auto" else backend,
        host=socket.gethostname(),
    )


def _choose_device(
    device: str, backend: str, numbers: Mapping[str, int], environment: Mapping[str, str]
) -> torch.device:
    if device == "cpu" and backend == "nccl":
        raise UsageError("--backend nccl needs CUDA, but --device cpu was asked for: use --backend gloo")
    if device == "cpu" or (device == "auto" and backend == "gloo"):
        return torch.device("cpu")
    if gpus := count_gpus():
        ranks, on_one_host = numbers["LOCAL_WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"] == numbers["WORLD_SIZE"]
        if device == backend == "auto" and gpus < ranks and on_one_host and _all_ranks_see_these_gpus(environment):
            if numbers["RANK"] == 0:
                logger.warning(
                    f"{ranks} ranks, but {gpus} GPU{'s' * (gpus > 1)} here: all take the CPU and gloo; for NCCL, start with "
                    f"--nproc_per_node={gpus}; to let ranks share a GPU, add --device cuda --backend gloo"
                )
            return torch.device("cpu")
        return gpu_of(numbers["LOCAL_RANK"], gpus)
    if backend == "nccl":
        raise UsageError(f"--backend nccl needs CUDA, but {why_no_gpu()}, or use --backend gloo")
    if device == "cuda":
        raise UsageError(f"--device cuda, but {why_no_gpu()}, or use --device cpu")
    return torch.device("cpu")


def _all_ranks_see_these_gpus(environment: Mapping[str, str]) -> bool:
    """Whether all ranks of this host see the same GPUs. A launcher may show each rank its own by CUDA_VISIBLE_DEVICES: then it is
    not what the process that started this one has, which may also be another user's and not tell."""
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return True
    shown = f"CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}"
    with contextlib.suppress(OSError):
        return os.fsencode(shown) in Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    return False


def implementation(device: torch.device) -> str:
    """The class that carries out the default group's collectives for tensors of this device, as ``ProcessGroupGloo``."""
    group = dist.group.WORLD
    assert group is not None
    # HACK: no public name tells the class. If torch renames it, this raises, at the start of each run.
    return type(group._get_backend(device)).__name__
