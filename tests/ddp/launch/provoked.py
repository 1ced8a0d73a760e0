"""Small programs that provoke the messages of ddp/launch/symptoms.md.

Those of ``MESSAGES`` and ``ON_TWO_RANKS`` raise; the other ones return what is wrong without a message.
"""

from __future__ import annotations

import argparse
import functools
import io
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10


def _report(exitcode: int) -> None:
    """torchrun's report of a rank that wrote no error file."""
    raise ChildFailedError("train.py", {0: ProcessFailure(0, os.getpid(), exitcode, "none")})


def rank_failed() -> None:
    _report(1)


def rank_killed() -> None:
    _report(-signal.SIGKILL)


def rank_crashed() -> None:
    _report(-signal.SIGSEGV)


def rank_aborted() -> None:
    _report(-signal.SIGABRT)


def rank_terminated() -> None:
    _report(-signal.SIGTERM)


def no_data_set() -> None:
    CIFAR10("nowhere")


def local_rank_flag() -> None:
    """A script with ``--local_rank``, and the command line that ``torch.distributed.launch`` makes for it."""
    from torch.distributed import launch, run

    _, _, command = run.config_from_args(launch.parse_args(["--nproc_per_node=1", "train.py"]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.parse_args([argument.replace("${local_rank}", "0") for argument in command[2:]])


def port_taken() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        TCPStore("localhost", other.getsockname()[1], 1, is_master=True)


def no_rendezvous_host() -> None:
    """The agent takes the endpoint for another machine, where no program listens."""
    create_backend(RendezvousParameters("c10d", "127.0.0.1:1", "run", 1, 1, is_host="0", read_timeout="1"))


def fp16_weights() -> None:
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2).half()).sum()).backward()
    scaler.unscale_(optimizer)


def numpy_state() -> None:
    file = io.BytesIO()
    torch.save(np.random.get_state(), file)
    file.seek(0)
    torch.load(file)


def in_worker(function: Callable[[Any], Any], batches: int = 4, num_workers: int = 1) -> DataLoader[Any]:
    """A loader whose workers call a function for each batch."""
    samples: Any = range(batches)
    return DataLoader(samples, num_workers=num_workers, collate_fn=function)


def killed_worker() -> None:
    list(in_worker(lambda _: os.kill(os.getpid(), signal.SIGKILL)))


def bus_error() -> None:
    """The signal that a worker gets from a full ``/dev/shm``."""
    list(in_worker(lambda _: os.kill(os.getpid(), signal.SIGBUS)))


def unpicklable() -> None:
    """A worker that is not forked gets a lambda."""
    samples: Any = range(2)
    list(DataLoader(samples, num_workers=1, collate_fn=lambda batch: batch, multiprocessing_context="spawn"))


def open_files() -> None:
    """Batches are kept until no more files can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 30, hard))
    try:
        list(in_worker(torch.tensor, 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def unused_parameters() -> None:
    network = nn.Linear(2, 2)
    network.head = nn.Linear(2, 2)
    model = DistributedDataParallel(network)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def reentrant_checkpoint() -> None:
    network: Any = nn.Linear(2, 2)
    network.forward = functools.partial(checkpoint, network.forward, use_reentrant=True)
    model = DistributedDataParallel(network, find_unused_parameters=True)
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()


def mixed_gradients() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.ones(1, 2)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)


def mixed_types() -> None:
    """A parameter is used for the first time in the last micro-step."""
    first, second, model = nn.Linear(2, 2), nn.Linear(2, 2), nn.Module()
    model.first, model.second = first, second
    model.forward = lambda inputs, both: first(inputs) + second(inputs) if both else first(inputs)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded: Any = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    for last in (False, True):
        sharded.set_requires_gradient_sync(last)
        sharded(torch.ones(1, 2), last).sum().backward()


def two_forward_passes() -> None:
    """An error up to the torch that hides the copy of the buffers from autograd."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    real, fake = model(torch.randn(4, 2)), model(torch.randn(4, 2))
    (real.sum() + fake.sum()).backward()


def uneven_batches() -> None:
    """Rank 1 has one batch more than rank 0, which meanwhile does something else."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(2 + dist.get_rank()):
        model(torch.ones(1, 2)).sum().backward()
    time.sleep(6)


def peer_leaves() -> None:
    """Rank 0 ends, and rank 1 waits for it."""
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(1))


MESSAGES = (
    *(
        local_rank_flag,
        port_taken,
        fp16_weights,
        numpy_state,
        killed_worker,
        bus_error,
        open_files,
        unpicklable,
        no_data_set,
    ),
    *(rank_failed, rank_killed, rank_crashed, rank_aborted, rank_terminated),
)
ON_TWO_RANKS = (unused_parameters, reentrant_checkpoint, mixed_gradients, mixed_types, two_forward_passes)


def threads_of_workers() -> int:
    """How many threads torch takes in a loader worker."""
    return next(iter(in_worker(lambda _: torch.get_num_threads())))  # type: ignore[no-any-return]


def whole_batches() -> list[int]:
    """The process that has made each of four batches, of two workers."""
    return list(in_worker(lambda _: os.getpid(), num_workers=2))


def prefixed_keys() -> tuple[bool, list[str]]:
    """Whether loading with ``strict=False`` has changed the weights, and the keys that did not fit."""
    model, saved = nn.Linear(2, 2), nn.Linear(2, 2)
    before = model.weight.clone()
    state = {f"module.{name}": value for name, value in saved.state_dict().items()}
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    return not torch.equal(before, model.weight), unexpected


def norm_of_shards() -> tuple[float, float, float]:
    """The norm of a sharded gradient: this rank's local part, that of all, and what clipping returns."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model(torch.randn(1, 4)).square().sum().backward()
    norm: Any = torch.linalg.vector_norm(model.weight.grad)
    returned: Any = clip_grad_norm_(model.parameters(), 1e9)
    return norm.to_local().item(), norm.full_tensor().item(), returned.full_tensor().item()
