"""The process group: how a rank joins the job, and leaves it.

Without torchrun, :func:`process_group` makes a group of one rank, so that one process and many share every line of code.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

# DDP imports this module when it is first constructed. The default group of that moment becomes the default argument of its
# functions, which would keep the group and its threads alive after destroy_process_group: a gloo thread that frees a tensor
# while Python shuts down aborts the process. Imported here, the module finds no group.
import torch.distributed.nn.functional
from torch.distributed.distributed_c10d import PrefixStore, Store

from common.distributed.agreement import require_agreement
from common.distributed.dist_env import DistEnv, find_dist_env
from common.distributed.rank_logging import rank_logging
from common.errors import UsageError, leaves_together
from common.gpu.devices import choose_implementation
from common.signals.stop_request import stop_signals, to_be_requeued
from ddp.rendezvous.addresses import offer_interface, require_master_address
from ddp.rendezvous.agent_watch import ending_with_agent
from ddp.rendezvous.launch_facts import launch_facts
from ddp.rendezvous.store_prefix import agree_on_prefix


@contextlib.contextmanager
def process_group(
    device: str = "auto", backend: str = "auto", timeout_s: float = 600.0, threads: int = 0, settings: Any = None
) -> Iterator[DistEnv]:
    """Join the job, and leave it cleanly on success, on an error, on Ctrl-C and on SIGTERM.

    :param device: one of :data:`DEVICES`; ``auto`` takes CUDA if there is a GPU
    :param backend: one of :data:`BACKENDS`; ``auto`` takes NCCL on CUDA and gloo on the CPU
    :param timeout_s: how long a rank waits for the others at the rendezvous, and in each collective
    :param threads: CPU threads for compute, per rank; 0 shares the usable cores among the node's ranks
    :param settings: the command's, which must be the same on all ranks; see ddp/rendezvous/launch_facts.py
    :raises UsageError: when only some of torchrun's variables are set, for a port in use, ranks that do not come in time or
        were started differently, NCCL without CUDA, or two of its ranks on one GPU
    """
    env = find_dist_env(device, backend)
    if env.device.type == "cuda":
        torch.cuda.set_device(env.device)
    torch.set_num_threads(threads or env.share_of_cores)
    with clean_exit(env):
        with rendezvous_errors(env):
            dist.init_process_group(
                env.backend,
                store=rendezvous_store(env, timeout_s, settings),
                rank=env.rank,
                world_size=env.world_size,
                timeout=datetime.timedelta(seconds=timeout_s),
                device_id=env.nccl_device,
            )
        yield env


@contextlib.contextmanager
def rank_process(env: DistEnv) -> Iterator[None]:
    """A block in which the process joins a group and works as a rank, until it leaves the group, whatever happens.

    Its log lines carry the rank. It ends as :func:`clean_exit`; an error of the rendezvous is a line, see :func:`rendezvous_errors`; the
    exit status after a signal asks a scheduler for another start.
    """
    with to_be_requeued(), clean_exit(env), rank_logging(env), rendezvous_errors(env):
        yield


@contextlib.contextmanager
def clean_exit(env: DistEnv) -> Iterator[None]:
    """A block in which the process joins a group. The group is left on success and on an error.

    Ctrl-C, SIGTERM, SIGUSR1, SIGHUP and the death of torchrun end the block as ``SystemExit``, and forks of loader workers are made safe.
    """
    if sys.version_info < (3, 11, 10):
        from ddp.rendezvous.fork_safety import rest_before_forks  # only for Pythons with the defect

        rest_before_forks()
    has_agent = "TORCHELASTIC_RUN_ID" in os.environ
    with stop_signals(), ending_with_agent() if has_agent else contextlib.nullcontext():
        together = False
        try:
            yield
            together = True
        except BaseException as error:
            together = leaves_together(error)
            raise
        finally:
            gc.collect()  # DDP modules sit in reference cycles, and the group's threads end with its last reference
            if dist.is_initialized():
                _leave_group(env, together)


def _leave_group(env: DistEnv, together: bool) -> None:
    """NCCL's destroy waits until all collectives are done, which they never are if this rank leaves alone. Its abort ends them.

    Leaving together must not abort: what this rank has sent may still be on its way to another.
    """
    if together or env.backend != "nccl":
        dist.destroy_process_group()
        return
    with contextlib.suppress(RuntimeError):  # the error that ends the block is the one to report
        # HACK: the public destroy waits. If torch renames it, a rank that leaves alone raises AttributeError over its own error.
        dist.distributed_c10d._abort_process_group()


def rendezvous_store(env: DistEnv, timeout_s: float, settings: Any = None) -> Store:
    """The store in which the ranks find each other's addresses, at MASTER_ADDR and MASTER_PORT. There they also compare what
    they were started with. From here on, gloo and NCCL offer the interface that leads there, and "nccl" is the implementation
    that overlaps (common/gpu/devices.py).

    :param timeout_s: seconds to wait for the other ranks
    :param settings: the command's dataclass; None if it has none
    :raises UsageError: on every rank, when the ranks were started differently; when MASTER_ADDR cannot be the place to meet, or
        ``--interface`` names no interface of this host
    """
    store = open_store(env, timeout_s, settings)
    if "RANK" in os.environ:  # a job of ranks
        require_agreement(store, env.rank, env.world_size, launch_facts(env, settings), timeout_s)
    return store


def open_store(env: DistEnv, timeout_s: float, settings: Any = None) -> Store:
    """:func:`rendezvous_store`, before the ranks compare anything."""
    if env.backend == "nccl":
        choose_implementation()
    interface = getattr(settings, "interface", None)
    if "RANK" in os.environ or interface is not None:
        offer_interface(os.environ.get("MASTER_ADDR", "localhost"), interface)
    if "RANK" not in os.environ:  # a group of one needs no rendezvous, and so no port
        return dist.HashStore()  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # otherwise rank 0 serves the store
    with _store_errors(env, address, port):
        if not by_agent:
            require_master_address(env, address, port, timeout_s)
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=env.is_main and not by_agent, timeout=timeout, wait_for_workers=False
        )
        if by_agent:
            return PrefixStore(agree_on_prefix(store, env.rank, env.world_size, timeout_s), store)
        return store  # which ranks come is checked by the caller


@contextlib.contextmanager
def rendezvous_errors(env: DistEnv) -> Iterator[None]:
    """A block that joins the process group. Errors that come once it has joined pass as they are.

    :raises UsageError: when a rank does not come in time, the ranks cannot reach each other, or NCCL cannot start on its GPU
    """
    try:
        yield
    except dist.DistStoreError as error:  # the others did not come in time
        if dist.is_initialized():
            raise
        raise UsageError(f"not all {env.world_size} ranks came within --timeout: {_first_line(error)}") from error
    except (
        RuntimeError
    ) as error:  # gloo raises this type if it reaches no other rank; NCCL and CUDA for all of their errors
        if dist.is_initialized():
            raise
        if env.backend == "nccl" and not isinstance(error, dist.DistNetworkError):
            raise UsageError(
                f"NCCL cannot start on {env.device} of {env.host}: {_nccls_line(error)}: nvidia-smi shows what uses the GPU, and "
                "NCCL_DEBUG=INFO what NCCL tried"
            ) from error
        if "RANK" not in os.environ:
            raise
        raise UsageError(
            f"the ranks met at MASTER_ADDR {os.environ['MASTER_ADDR']}, but {env.host} cannot form a group with the others: "
            f"{_first_line(error)}: hosts must reach each other on every port; --interface says which way"
        ) from error


@contextlib.contextmanager
def _store_errors(env: DistEnv, address: str, port: int) -> Iterator[None]:
    """:raises UsageError: when the port is in use, or the address cannot be reached"""
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise UsageError(
                f"MASTER_PORT {port} is in use on {address}: set another, or let torchrun choose a free one"
            ) from error
        raise UsageError(
            f"no rendezvous at MASTER_ADDR {address}, MASTER_PORT {port}, from {env.host}: {_first_line(error)}: has rank 0 "
            "started there, and does a firewall let the port through?"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _nccls_line(error: Exception) -> str:
    """NCCL's or CUDA's own line. NCCL's message ends with it, as "Last error", if there was one. CUDA's begins with it."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return _first_line(error)
    message, *_ = str(error).partition("Exception raised from ")  # the rest is stack frames of C++
    lines = [re.sub(r"^(NCCL )?last error:", "", line.strip(), flags=re.IGNORECASE) for line in message.splitlines()]
    return next((line.strip() for line in reversed(lines) if line.strip()), repr(error))
