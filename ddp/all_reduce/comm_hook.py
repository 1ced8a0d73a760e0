"""A communication hook for torch's ``DistributedDataParallel``: it averages gradients by an all-reduce of this package.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*shared_memory_hook())  # before the first backward pass

DDP calls the hook with each bucket of gradients as soon as it is complete, goes on with backward, and waits at its end for the future
that the hook returned. A DDP by hand has its buckets in shared memory. Here they are DDP's own, so each is copied there and back, in
the thread that sums.
"""

# (Without `from __future__ import annotations`: DDP refuses a hook whose annotations are strings.)

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from common.errors import UsageError
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.choice import build_all_reduce


class HookState:
    """A thread that averages buckets, in the order in which they became complete: the same on all ranks.

    DDP has the only reference to it. When the DDP module is freed, the thread ends, and connections and memory go with it.

    :param all_reduce: sums the buckets
    :param ranks: their number
    :param dtype: in which gradients are divided and summed; their own when None
    """

    def __init__(self, all_reduce: AllReduce, ranks: int, dtype: torch.dtype | None = None) -> None:
        self._all_reduce, self._ranks, self._dtype = all_reduce, ranks, dtype
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce-hook")
        self._memory: dict[torch.dtype, Tensor] = {}  # for the largest bucket of each dtype

    def start(self, gradients: Tensor) -> torch.futures.Future[BaseException | None]:
        """Begin to average a bucket in place.

        :param gradients: ``[n]``
        :returns: a future of None, or of the error that ended it
        """
        ended: torch.futures.Future[BaseException | None] = torch.futures.Future()
        average = self._thread.submit(self._average, gradients)
        average.add_done_callback(lambda done: ended.set_result(done.exception()))
        return ended

    def _average(self, gradients: Tensor) -> None:
        rounded = gradients.to(self._dtype or gradients.dtype)
        numel, dtype = rounded.numel(), rounded.dtype
        if dtype not in self._memory or self._memory[dtype].numel() < numel:
            self._memory[dtype] = self._all_reduce.allocate(numel, dtype, rounded.device)
        sums = self._memory[dtype][:numel]
        torch.div(rounded, self._ranks, out=sums)
        self._all_reduce.run(sums)
        gradients.copy_(sums)


def average(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: the average over the ranks, in the bucket's own memory.

    :raises UsageError: for gradients on a GPU
    """
    gradients = bucket.buffer()
    if gradients.device.type != "cpu":
        raise UsageError(f"this hook averages gradients on the CPU, not on {gradients.device}: leave it out there")

    def result(ended: torch.futures.Future[BaseException | None]) -> Tensor:
        if error := ended.value():
            raise error  # here, so that DDP raises it in backward
        return gradients

    return state.start(gradients).then(result)


Hook = Callable[[HookState, GradBucket], torch.futures.Future[Tensor]]


def shared_memory_hook(group: dist.ProcessGroup | None = None) -> tuple[HookState, Hook]:
    """State and hook for ``register_comm_hook``: averages in shared memory on each host, and by rings between hosts. A collective.

    On one host the sums are in the order of the ranks: on two ranks, the bits of DDP without a hook. If a rank ends, the backward
    passes of the others raise an error with its number.

    :param group: the DDP module's; the default group when None
    :raises UsageError: on all ranks of a host that has not enough memory; outside Linux
    """
    return hook_of("hierarchical", group)


def hook_of(
    name: str, group: dist.ProcessGroup | None = None, dtype: torch.dtype | None = None
) -> tuple[HookState, Hook]:
    """As :func:`shared_memory_hook`, for any of :data:`ddp.all_reduce.ALL_REDUCES` but the backend's: from a thread, its sums would
    come between those of the loop, on each rank in another order.

    :param dtype: in which gradients are divided and summed; their own when None
    """
    return HookState(build_all_reduce(name, group), dist.get_world_size(group), dtype), average
