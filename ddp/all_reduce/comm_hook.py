"""A communication hook for torch's ``DistributedDataParallel``: it averages gradients by an all-reduce of this package.

    model = DistributedDataParallel(network)
    model.register_comm_hook(*shared_memory_hook())  # before the first backward pass

DDP calls the hook with each bucket of gradients as soon as it is complete, goes on with backward, and waits at its end for the future
that the hook returned. The buckets are DDP's own. When the hook first sees one, it moves it into shared memory, with the gradients
that are views of it. From then on nothing is copied.
"""

# (Without `from __future__ import annotations`: DDP refuses a hook whose annotations are strings.)

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from common.errors import UsageError
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.in_thread import InThread

logger = logging.getLogger(__name__)


class HookState:
    """A thread that averages buckets, in the order in which they became complete: the same on all ranks.

    DDP has the only reference to it. When the DDP module is freed, the thread ends, and connections and memory go with it.

    :param all_reduce: sums the buckets
    :param ranks: their number
    :param dtype: in which gradients are divided and summed; their own when None
    """

    def __init__(self, all_reduce: InThread, ranks: int, dtype: torch.dtype | None = None) -> None:
        self._all_reduce, self._ranks, self._dtype = all_reduce, ranks, dtype
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="all-reduce-hook")
        self._shares = True  # there is room in /dev/shm
        self._shared: dict[int, Tensor] = {}  # the buckets, by their number
        self._rounded: dict[int, Tensor] = {}  # of each bucket, if ``dtype`` is another

    def start(self, bucket: GradBucket) -> torch.futures.Future[BaseException | None]:
        """Begin to average a bucket in place.

        :returns: a future of None, or of the error that ended it
        """
        ended: torch.futures.Future[BaseException | None] = torch.futures.Future()
        average = self._thread.submit(self._average, bucket.index(), bucket.buffer())
        average.add_done_callback(lambda done: ended.set_result(done.exception()))
        return ended

    def _average(self, index: int, gradients: Tensor) -> None:
        if self._dtype in (None, gradients.dtype):
            self._share(index, gradients)
            gradients.div_(self._ranks)  # before they are summed, as DDP does
            self._all_reduce.run(gradients)
            return
        rounded = self._rounded.get(index)
        if rounded is None or rounded.numel() != gradients.numel():
            rounded = self._all_reduce.allocate(gradients.numel(), self._dtype, gradients.device)
            self._rounded[index] = rounded
        rounded.copy_(gradients).div_(self._ranks)
        self._all_reduce.run(rounded)
        gradients.copy_(rounded)

    def _share(self, index: int, gradients: Tensor) -> None:
        """Move a bucket into shared memory, unless it is there."""
        known = self._shared.get(index)
        if not self._shares or (known is not None and known.data_ptr() == gradients.data_ptr()):
            return
        if known is not None:  # DDP has rebuilt its buckets, all of them
            for old in self._shared.values():
                self._all_reduce.unshare(old)
            self._shared.clear()
        self._shares = self._all_reduce.share(gradients)
        self._shared[index] = gradients
        if not self._shares and dist.get_rank() == 0:
            logger.warning(
                "/dev/shm has no room for the gradients, so they are copied in each step: docker run --shm-size gives it more"
            )


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

    return state.start(bucket).then(result)


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
    all_reduce = build_all_reduce(name, group)
    assert isinstance(all_reduce, InThread)
    return HookState(all_reduce, dist.get_world_size(group), dtype), average
