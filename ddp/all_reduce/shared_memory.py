"""All-reduce between the ranks of one host: no bytes are sent, since every rank reads and writes the others' buffers.

Each rank allocates its buffers in memory that the others map too. An all-reduce is then

    barrier  ->  add up one part of all buffers, write the sum to all of them  ->  barrier

A barrier is one message on a Unix-domain socket from each rank to each. Sockets have three advantages over flags in the
shared memory: a rank that sleeps at a socket leaves its core to the others' computation; the kernel orders reads and writes
of the memory around the messages; and it reports the end of a process at once.

Nothing here has a name in the file system: the sockets are in Linux's abstract namespace, and the memory is known by file
descriptors alone, which are passed over the sockets. So nothing is left behind, whichever process is killed, and the size of
/dev/shm does not matter.

    torchrun --nproc_per_node=2 -m ddp.train --strategy handwritten --all-reduce shared-memory
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.errors import UsageError
from ddp.all_reduce.in_thread import ShardedInThread
from ddp.all_reduce.local_sockets import LocalSockets
from ddp.all_reduce.p2p import P2P, require_cpu

BLOCK_BYTES = 256 << 10  # of each rank's buffer; blocks of two ranks stay in a core's second-level cache
SCRATCH_BYTES = 4 << 20
SMALL_BYTES = 64 << 10  # up to this size, one barrier and more additions are faster than two barriers
ALIGNMENT = 64  # elements, so that no two ranks write to the same cache line


class SharedMemory(ShardedInThread):
    """Sums CPU tensors over the ranks of one host, in rank order: all ranks get the same bits, every time.

    Two steps, however many ranks there are; in each, every rank sends p-1 messages of a few bytes. It reads n/p bytes of
    each of p buffers and writes as many. Time: 2 alpha + 2pn / bandwidth. The bandwidth is that of the memory or the caches;
    alpha, the time to wake a rank, is some 10 us.

    Tensors that are small, or do not lie in memory of :meth:`allocate`, are copied to such memory and back.

    :param p2p: the ranks, all on one host
    :param parts: into how many parts a buffer is divided; the i-th rank adds up the i-th. The number of ranks when None
    :param between: called with each part of the sum by the rank that has added it up, before the others get it:
        :mod:`ddp.all_reduce.hierarchical` adds the other hosts' sums there
    :raises UsageError: on all ranks, if they are on several hosts or there is too little memory; outside Linux
    """

    def __init__(self, p2p: P2P, parts: int | None = None, between: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        if sys.platform != "linux":
            raise UsageError("--all-reduce shared-memory and hierarchical need Linux: use another, such as ring")
        if len(set(p2p.host_ids)) > 1:
            names = ", ".join(p2p.hosts[p2p.host_ids.index(host)] for host in dict.fromkeys(p2p.host_ids))
            raise UsageError(
                f"--all-reduce shared-memory needs all ranks on one host; these are on {names}: use hierarchical"
            )
        self._p2p, self._parts, self._between = p2p, parts or p2p.size, between
        self._sockets = LocalSockets(p2p)
        self._scratch = _Segment(p2p, self._sockets, SCRATCH_BYTES + 2 * SMALL_BYTES)
        self._segments = [self._scratch]
        self._turn = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` that all ranks map; they, or a part of them, are summed without a copy.

        A collective; no sum may be running.

        :raises UsageError: on all ranks, if there is too little memory; for another device than the CPU
        """
        require_cpu(device)
        segment = _Segment(self._p2p, self._sockets, numel * dtype.itemsize)
        self._segments.append(segment)
        return segment.memory[self._p2p.rank].view(dtype)

    def share(self, buffer: Tensor) -> bool:
        require_cpu(buffer.device)
        storage = buffer.untyped_storage()
        # Small ones are copied in any case. A storage with other tensors may be in use, so it is not moved.
        if buffer.nbytes <= SMALL_BYTES or storage.nbytes() != buffer.nbytes:
            return True
        try:
            # HACK: torch.multiprocessing gets the file of a shared tensor in this way. share_memory_() moves alike, but keeps it.
            file = os.dup(storage._share_fd_cpu_()[0])
        except RuntimeError:  # /dev/shm is full
            file = os.memfd_create("empty")
        try:
            segment = _Segment(self._p2p, self._sockets, storage.nbytes(), file)
        except UsageError:
            return False
        segment.memory[self._p2p.rank] = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._segments.append(segment)
        return True

    def unshare(self, buffer: Tensor) -> None:
        start = buffer.untyped_storage().data_ptr()
        self._segments = [one for one in self._segments if one.memory[self._p2p.rank].data_ptr() != start]

    def _sum(self, buffer: Tensor) -> None:
        with self._summing(buffer):
            if buffer.nbytes > SMALL_BYTES or self._between:
                self._run_large(buffer)
            else:
                self._run_small(buffer)

    @contextlib.contextmanager
    def _summing(self, buffer: Tensor) -> Iterator[None]:
        """A block that sums. If it fails on this rank, the ranks that wait for this one see that at once."""
        require_cpu(buffer.device)
        try:
            yield
        except BaseException:
            self._sockets.close()
            raise

    def _run_small(self, buffer: Tensor) -> None:
        """Every rank publishes a copy of its tensor, and adds up all copies by itself.

        One barrier is enough, because two places for copies are used in turn. While others still read one place, the next
        copies go to the other; when a place is used again, all ranks have passed the barrier in between.
        """
        self._turn = 1 - self._turn
        copies = self._scratch.views(SCRATCH_BYTES + self._turn * SMALL_BYTES, buffer)
        copies[self._p2p.rank].copy_(buffer)
        self._sockets.meet(f"to sum {buffer.numel()} {buffer.dtype}")
        buffer.copy_(copies[0])
        for other in copies[1:]:
            buffer += other

    def _run_large(self, buffer: Tensor) -> None:
        if not buffer.numel():  # an empty tensor lies in no segment
            return
        buffers = self._mapped(buffer, "sum")
        if buffers is not None:
            self._sum_part(buffers)
            self._sockets.meet("to the end of a sum")
            return
        for chunk in buffer.split(SCRATCH_BYTES // buffer.element_size()):
            scratch = self._scratch.views(0, chunk)[self._p2p.rank]
            scratch.copy_(chunk)
            self._run_large(scratch)
            chunk.copy_(scratch)

    def _mapped(self, buffer: Tensor, purpose: str) -> list[Tensor] | None:
        """All ranks' buffers after a barrier, if they lie in memory of :meth:`allocate`; None if they do not."""
        for number, segment in enumerate(self._segments):
            offset = buffer.data_ptr() - segment.memory[self._p2p.rank].data_ptr()
            if 0 <= offset <= segment.nbytes - buffer.nbytes:
                self._sockets.meet(
                    f"to {purpose} {buffer.numel()} {buffer.dtype} from byte {offset} of allocation {number}"
                )
                return segment.views(offset, buffer)
        return None

    def _sum_part(self, buffers: list[Tensor]) -> None:
        """Add up this rank's part of all buffers, in blocks that stay in its cache until the sum is written to them all."""
        numel = buffers[0].numel()
        length = -(-numel // (self._parts * ALIGNMENT)) * ALIGNMENT
        begin, end = (min(numel, index * length) for index in (self._p2p.rank, self._p2p.rank + 1))
        if begin == end:
            return
        block = end - begin if self._between else BLOCK_BYTES // buffers[0].element_size()
        for first, *others in zip(*(buffer[begin:end].split(block) for buffer in buffers), strict=True):
            for other in others:
                first += other
            if self._between:
                self._between(first)
            for other in others:
                other.copy_(first)

    def reduce_scatter(self, buffer: Tensor) -> None:
        self._in_shards(buffer, "reduce-scatter", self._sum_shard)

    def all_gather(self, buffer: Tensor) -> None:
        self._in_shards(buffer, "all-gather", self._copy_shards)

    def _in_shards(self, buffer: Tensor, purpose: str, run: Callable[[list[Tensor], Tensor], None]) -> None:
        """Call ``run`` with all ranks' buffers, ``[p, s]``, and where its result belongs; between two barriers.

        Buffers that lie elsewhere come by way of the scratch memory, some columns of all shards at a time.
        """
        if not buffer.numel():
            return
        size = self._p2p.size
        own = buffer.view(size, -1)
        with self._summing(buffer):
            buffers = self._mapped(buffer, purpose)
            if buffers is not None:
                run([other.view(size, -1) for other in buffers], own)
                self._sockets.meet(f"to the end of a {purpose}")
                return
            for columns in own.split(SCRATCH_BYTES // (size * buffer.element_size()), dim=1):
                scratches = [view.view(columns.shape) for view in self._scratch.views(0, columns)]
                needed = slice(None) if purpose == "reduce-scatter" else slice(self._p2p.rank, self._p2p.rank + 1)
                scratches[self._p2p.rank][needed] = columns[needed]
                self._sockets.meet(f"to {purpose} {columns.numel()} {columns.dtype}")
                run(scratches, columns)
                self._sockets.meet(f"to the end of a {purpose}")

    def _sum_shard(self, buffers: list[Tensor], own: Tensor) -> None:
        """Add up this rank's shard of all buffers. No other rank reads or writes that shard."""
        rank = self._p2p.rank
        block = BLOCK_BYTES // own.element_size()
        for result, first, *others in zip(
            own[rank].split(block), *(b[rank].split(block) for b in buffers), strict=True
        ):
            for other in others:
                first += other
            result.copy_(first)

    def _copy_shards(self, buffers: list[Tensor], own: Tensor) -> None:
        for rank, theirs in enumerate(buffers):
            if rank != self._p2p.rank:
                own[rank].copy_(theirs[rank])

    def close(self) -> None:
        super().close()
        self._sockets.close()
        for segment in self._segments:
            segment.memory.clear()


class _Segment:
    """As many bytes of each rank, mapped by all: ``memory[rank]``, uint8 ``[nbytes]``.

    :param nbytes: the same on all ranks
    :param file: this rank's memory, which is closed; shorter if there is too little. Zeros when None
    :raises UsageError: on all ranks, if there is too little memory on one
    """

    def __init__(self, p2p: P2P, sockets: LocalSockets, nbytes: int, file: int | None = None) -> None:
        self.nbytes = nbytes
        length = max(nbytes, 1)  # a mapping cannot be empty
        files = [_anonymous_file(length, p2p.size) if file is None else file]
        try:
            files = sockets.meet(f"to allocate {nbytes} bytes", *files)
            if any(os.fstat(file).st_size < length for file in files):
                raise UsageError(
                    f"--all-reduce shared-memory found no {_mib(p2p.size * length)} of memory on "
                    f"{p2p.hosts[p2p.rank]}, which has {_mib(_available_bytes())} left: free some, "
                    "start fewer ranks there, or raise ulimit -f"
                )
            # torch keeps a mapping for as long as a tensor lies in it.
            mappings = [mmap.mmap(file, length, mmap.MAP_SHARED | mmap.MAP_POPULATE) for file in files]
        finally:
            for file in files:
                os.close(file)
        self.memory = [torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes] for mapping in mappings]

    def views(self, offset: int, like: Tensor) -> list[Tensor]:
        """For each rank, the part of its memory from byte ``offset`` that is as long as ``like``, with its dtype."""
        return [memory[offset : offset + like.nbytes].view(like.dtype) for memory in self.memory]


def _anonymous_file(length: int, copies: int) -> int:
    """Zeros in memory, known by a file descriptor; shorter than ``length`` if there is not enough memory.

    The file gets its memory now: otherwise, with too little memory, the first write to a page would be a SIGBUS.

    :param length: bytes
    :param copies: how many such files the ranks of this host make at the same time
    """
    file = os.memfd_create("all-reduce")
    if copies * length <= _available_bytes():  # beyond that, the kernel would kill a process instead of refusing
        with contextlib.suppress(OSError):
            os.posix_fallocate(file, 0, length)
    return file


def _available_bytes() -> int:
    import psutil  # not at the top: only this all-reduce needs it

    return int(psutil.virtual_memory().available)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
