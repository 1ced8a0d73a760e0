"""A communication hook for torch's ``DistributedDataParallel``: it averages gradients by an all-reduce of this package.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*shared_memory_hook())  # before the first backward pass

DDP calls the hook with each bucket of gradients as soon as it is complete, goes on with backward, and takes the average from the
future that the hook returned. A DDP by hand has its buckets in shared memory. Here they are DDP's own, so each is copied to shared
memory and back.
"""

# (Without `from __future__ import annotations`: DDP refuses a hook whose annotations are strings.)

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from common.errors import UsageError
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.in_thread import InThread


class HookState:
    """How :func:`average` sums. It lives as long as the DDP module that it was registered with.

    :param all_reduce: sums the buckets
    :param ranks: their number
    :param dtype: in which gradients are divided and summed; their own when None
    """

    def __init__(self, all_reduce: InThread, ranks: int, dtype: torch.dtype | None = None) -> None:
        self.all_reduce, self.ranks, self.dtype = all_reduce, ranks, dtype


def average(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: the average over the ranks, in the bucket's own memory.

    :raises UsageError: for gradients on a GPU
    """
    gradients = bucket.buffer()
    if gradients.device.type != "cpu":
        raise UsageError(f"this hook averages gradients on the CPU, not on {gradients.device}: leave it out there")
    sums = gradients.to(state.dtype or gradients.dtype).div_(state.ranks)
    ended: torch.futures.Future[BaseException | None] = torch.futures.Future()
    state.all_reduce.start(sums).then(ended.set_result)

    def result(ended: torch.futures.Future[BaseException | None]) -> Tensor:
        if error := ended.value():
            raise error  # here, so that DDP raises it in backward
        return gradients if sums is gradients else gradients.copy_(sums)

    return ended.then(result)


Hook = Callable[[HookState, GradBucket], torch.futures.Future[Tensor]]


def shared_memory_hook(group: dist.ProcessGroup | None = None) -> tuple[HookState, Hook]:
    """State and hook for ``register_comm_hook``: averages in shared memory on each host, and by rings between hosts. A collective.

    On one host the sums are in the order of the ranks: on two ranks, the bits of DDP without a hook. When the DDP module is freed, the
    hook's thread, connections and memory go with it. If a rank ends, the backward passes of the others raise an error with its number.

    :param group: the DDP module's; the default group when None
    :raises UsageError: on all ranks of a host that has not enough memory; outside Linux
    """
    return hook_of("hierarchical", group)


def hook_of(
    name: str, group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None
) -> tuple[HookState, Hook]:
    """As :func:`shared_memory_hook`, for any of :data:`ddp.all_reduce.ALL_REDUCES` but the backend's, which needs none.

    :param dtype: in which gradients are divided and summed; their own when None
    """
    all_reduce = build_all_reduce(name, group)
    assert isinstance(all_reduce, InThread)
    return HookState(all_reduce, dist.get_world_size(group), dtype), average
