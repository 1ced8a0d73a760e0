"""All-reduce between the ranks of one host: no bytes travel, since every rank reads and writes what the others hold.

Each rank allocates its buffers in memory that the others map too. An all-reduce is then

    wait until all have come  ->  add up one part of all buffers, write the sum to all of them  ->  wait until all are done

and either wait is one message on a Unix-domain socket from each rank to each. Sockets, and not flags in the shared memory,
because a rank that sleeps at a socket leaves its core to the others' computation, because the kernel orders reads and writes
of the memory around the messages, and because it reports a rank's end at once, whatever ended it.

Nothing here has a name in the file system: the sockets are in Linux's abstract namespace, and the memory is known by file
descriptors alone, which travel over the sockets. So nothing can be left behind, whoever is killed whenever; nor does it
matter how small /dev/shm is.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

from common.cli import UsageError
from ddp.allreduce import AllReduce, Naive
from ddp.peers import Peers

BLOCK_BYTES = 256 << 10  # of each rank's buffer; that of two ranks stays in a core's second-level cache
SCRATCH_BYTES = 4 << 20
ALIGNMENT = 64  # elements, so that no two ranks write to the same cache line
LOOKS = 20  # at the sockets before sleeping, in some 10 us: to be woken takes longer than many a rank is late
MESSAGE_BYTES = 1024
SECRET_BYTES = 16


class SharedMemory(AllReduce):
    """Sums CPU tensors over the ranks of one host; in rank order, so that the same bits come out on all, every time.

    n bytes at P ranks: two steps, however many ranks there are, each of P - 1 messages per rank. A rank reads n / P bytes of
    P buffers and writes as many: n read and n written, where a ring sends and receives 2 n (P - 1) / P each. All together
    move 2 P n bytes through the host's memory, or its caches::

        time = 2 alpha + 2 P n / memory bandwidth        alpha: to wake a rank by a message, some 10 us

    A tensor that does not lie in memory of :meth:`allocate` is copied there and back, piece by piece.

    :param peers: all on one host
    :param parts: of a buffer; the i-th rank adds up the i-th. As many as there are ranks when None
    :param between: called with each part of the sum by the rank that has added it up, before the others get it:
        :mod:`ddp.hierarchical` adds what other hosts have
    :raises UsageError: on all ranks, if they are on several hosts or have not enough memory; outside Linux
    """

    def __init__(self, peers: Peers, parts: int | None = None, between: Callable[[Tensor], None] | None = None) -> None:
        super().__init__()
        hosts = find_hosts(peers)
        if len(set(hosts)) > 1:
            names = ", ".join(peers.hosts[hosts.index(host)] for host in dict.fromkeys(hosts))
            raise _seen_by_all(
                f"--all-reduce shared-memory needs all ranks on one host; these are on {names}: use hierarchical"
            )
        self._rank, self._parts, self._between = peers.rank, parts or peers.size, between
        self._sockets = _Sockets(peers)
        self._segments: list[_Segment] = []
        self._scratch = self.allocate(SCRATCH_BYTES, torch.uint8, torch.device("cpu"))

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros ``[numel]`` that all ranks map, a collective: they, and any part of them, are summed where they are.

        :raises UsageError: on all ranks, if there is not enough memory; for another device than the CPU
        """
        _require_cpu(device)
        segment = _Segment(self._sockets, numel * dtype.itemsize)
        self._segments.append(segment)
        return segment.memory[self._rank].view(dtype)

    def run(self, buffer: Tensor) -> None:
        _require_cpu(buffer.device)
        try:
            self._run(buffer)
        except BaseException:
            self._sockets.close()  # those that wait for this rank learn at once that it does not come
            raise

    def _run(self, buffer: Tensor) -> None:
        if not buffer.numel():
            return
        for number, segment in enumerate(self._segments):
            offset = buffer.data_ptr() - segment.memory[self._rank].data_ptr()
            if 0 <= offset <= segment.nbytes - buffer.nbytes:
                self._sockets.meet(f"to sum {buffer.numel()} {buffer.dtype} from byte {offset} of allocation {number}")
                self._sum([memory[offset : offset + buffer.nbytes].view(buffer.dtype) for memory in segment.memory])
                self._sockets.meet("when all is summed")
                return
        for piece in buffer.split(SCRATCH_BYTES // buffer.element_size()):
            scratch = self._scratch[: piece.nbytes].view(piece.dtype)
            scratch.copy_(piece)
            self._run(scratch)
            piece.copy_(scratch)

    def _sum(self, buffers: list[Tensor]) -> None:
        """This rank's part, in blocks that stay in its cache until the sum is written everywhere."""
        numel = buffers[0].numel()
        length = -(-numel // (self._parts * ALIGNMENT)) * ALIGNMENT
        begin, end = min(numel, self._rank * length), min(numel, (self._rank + 1) * length)
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

    def close(self) -> None:
        super().close()
        self._sockets.close()
        self._segments.clear()


class _Segment:
    """As many bytes of each rank, mapped by all: ``memory[rank]``, uint8 ``[nbytes]``.

    :param nbytes: the same on all ranks
    :raises UsageError: on all ranks
    """

    def __init__(self, sockets: _Sockets, nbytes: int) -> None:
        self.nbytes = nbytes
        length = max(nbytes, 1)  # nothing cannot be mapped
        peers = sockets.peers
        files = [_anonymous_file(length, peers.size)]
        try:
            files = sockets.meet(f"to allocate {nbytes} bytes", *files)
            if any(os.fstat(file).st_size < length for file in files):
                raise _seen_by_all(
                    f"--all-reduce shared-memory found no {_mib(peers.size * length)} of memory on "
                    f"{peers.hosts[peers.rank]}, which has {_mib(psutil.virtual_memory().available)} left: free some, "
                    "start fewer ranks there, or raise ulimit -f"
                )
            # torch keeps a mapping for as long as a tensor lies in it.
            mappings = [mmap.mmap(file, length, mmap.MAP_SHARED | mmap.MAP_POPULATE) for file in files]
        finally:
            for file in files:
                os.close(file)
        self.memory = [torch.frombuffer(mapping, dtype=torch.uint8)[:nbytes] for mapping in mappings]


def _anonymous_file(length: int, copies: int) -> int:
    """Zeros in memory, known by a file descriptor; shorter than ``length`` if there is not enough memory.

    The file gets its memory now: later, the first write to a page that cannot be had would be a SIGBUS.

    :param copies: that the ranks of this host make at the same time
    """
    file = os.memfd_create("all-reduce")
    if copies * length <= psutil.virtual_memory().available:  # beyond, the kernel does not say no: it kills somebody
        with contextlib.suppress(OSError):
            os.posix_fallocate(file, 0, length)
    return file


class _Sockets:
    """A Unix-domain socket between each two ranks of a host, for them to wait for each other and hand over files.

    :param peers: all on one host; to connect them is a collective
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._connections: dict[int, socket.socket] = {}
        # A loader worker that is forked later must not hold the connections of its rank when that is killed.
        close = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (bound := close()) and bound())

        with _new_socket(peers.timeout_s) as listener:
            listener.bind("")  # to an abstract address that the kernel chooses, where all on the host could connect
            listener.listen()
            address, secret = listener.getsockname(), secrets.token_bytes(SECRET_BYTES)
            for peer in range(peers.rank):
                invitation = torch.empty(len(address + secret), dtype=torch.uint8)
                peers.receive(invitation, peer)
                with self._counting_on(peer):
                    self._connections[peer] = _connect(bytes(invitation.tolist()), peers.timeout_s)
            for peer in range(peers.rank + 1, peers.size):
                peers.send(torch.tensor(list(address + secret), dtype=torch.uint8), peer)
                with self._counting_on(peer):
                    self._connections[peer] = _accept(listener, secret)

    def meet(self, what: str, *files: int) -> list[int]:
        """Wait until all ranks have come.

        :param what: they come to do, the same on all ranks
        :param files: a file descriptor for the others, or none; to be closed by the caller
        :returns: those of all ranks, in rank order
        :raises RankLost: if one has ended, or does not come in time
        """
        for peer, connection in self._connections.items():
            with self._counting_on(peer):
                socket.send_fds(connection, [what.encode()], files)
        gathered = {self.peers.rank: list(files)}
        waiting = {connection.fileno(): peer for peer, connection in self._connections.items()}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self.peers.timeout_s
        while waiting:
            ready = _look(poll, deadline)
            if not ready:
                raise self.peers.lost(min(waiting.values()), TimeoutError(f"no message {what}"))
            for descriptor, _ in ready:
                peer = waiting.pop(descriptor)
                poll.unregister(descriptor)
                with self._counting_on(peer):
                    message, gathered[peer], *_ = socket.recv_fds(self._connections[peer], MESSAGE_BYTES, 1)
                    if not message:
                        raise ConnectionResetError("closed")
                if message != what.encode():
                    raise RuntimeError(
                        f"rank {self.peers.rank} came {what}, but rank {peer} {message.decode()}: all ranks must call an "
                        "all-reduce in the same order, with tensors of the same size and dtype from the same allocation"
                    )
        return [file for peer in range(self.peers.size) for file in gathered[peer]]

    def close(self) -> None:
        """Who waits for this rank, or will, sees that it has gone; so does this rank itself."""
        for connection in self._connections.values():
            connection.close()

    @contextlib.contextmanager
    def _counting_on(self, peer: int) -> Iterator[None]:
        """A block in which a connection fails if its other end has."""
        try:
            yield
        except OSError as error:
            raise self.peers.lost(peer, error) from error


def _look(poll: select.poll, deadline: float) -> list[tuple[int, int]]:
    """The descriptors at which something has arrived, or the end; none at the deadline."""
    for _ in range(LOOKS):
        if ready := poll.poll(0):
            return ready
    return poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


def _new_socket(timeout_s: float) -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new.settimeout(timeout_s)
    return new


def _connect(invitation: bytes, timeout_s: float) -> socket.socket:
    """To the rank that sent its address and secret."""
    connection = _new_socket(timeout_s)
    connection.connect(invitation[:-SECRET_BYTES])
    connection.send(invitation[-SECRET_BYTES:])
    connection.settimeout(None)  # what is sent or received from now on does not have to wait
    return connection


def _accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """The rank that was invited."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(listener.gettimeout())
        if connection.recv(SECRET_BYTES) == secret:
            connection.settimeout(None)
            return connection
        connection.close()


def find_hosts(peers: Peers) -> list[int]:
    """For each rank a number that it shares with those on its host alone: a collective.

    A host is where abstract sockets connect: a network namespace (as each container has) of one boot of one machine.

    :raises UsageError: outside Linux
    """
    if sys.platform != "linux":
        raise _seen_by_all("shared memory between ranks is written for Linux: use another --all-reduce, such as ring")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    host = f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"
    hosts = torch.zeros(peers.size, dtype=torch.int64)
    hosts[peers.rank] = int.from_bytes(hashlib.sha256(host.encode()).digest()[:8], "little", signed=True)
    Naive(peers).run(hosts)  # each rank has filled in its own
    return hosts.tolist()


def _require_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise _seen_by_all(f"--all-reduce shared-memory is for tensors of the CPU, not of {device}: use backend")


def _seen_by_all(message: str) -> UsageError:
    mistake = UsageError(message)
    mistake.seen_by_all = True
    return mistake


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
