"""Unix-domain sockets between the ranks of a host: a barrier that also passes file descriptors.

A rank that sleeps at a socket leaves its core to the others' computation, and sees at once when the other process ends. The
sockets are in Linux's abstract namespace: they leave nothing behind in the file system, whichever process is killed.
"""

from __future__ import annotations

import array
import os
import secrets
import select
import socket
import time
import weakref

import torch

from ddp.all_reduce.p2p import P2P

MESSAGE_BYTES = 1024
FILE_BYTES = 64  # of ancillary data: room for a descriptor
SECRET_BYTES = 16


class LocalSockets:
    """A Unix-domain socket between each two ranks of a host. To make one is a collective.

    :param p2p: the ranks, all on one host
    """

    def __init__(self, p2p: P2P) -> None:
        self._p2p = p2p
        self._connections: dict[int, socket.socket] = {}
        # A loader worker that is forked later must not hold the connections of its rank when that is killed.
        close = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (bound := close()) and bound())

        with _new_socket(p2p.timeout_s) as listener:
            listener.bind("")  # the kernel chooses an abstract address, to which any process of the host could connect
            listener.listen()
            invitation = listener.getsockname() + secrets.token_bytes(SECRET_BYTES)
            try:
                for peer in range(p2p.rank):
                    theirs = torch.empty(len(invitation), dtype=torch.uint8)
                    p2p.receive(theirs, peer)
                    self._connections[peer] = _connect(bytes(theirs.tolist()), p2p.timeout_s)
                for peer in range(p2p.rank + 1, p2p.size):
                    p2p.send(torch.tensor(list(invitation), dtype=torch.uint8), peer)
                    self._connections[peer] = _accept(listener, invitation[-SECRET_BYTES:])
            except OSError as error:
                raise RuntimeError(f"rank {p2p.members[peer]} is lost: {error}") from error

    def meet(self, what: str, *files: int) -> list[int]:
        """A barrier: return when all ranks have called this.

        :param what: the purpose of the call, which must be the same on all ranks
        :param files: a file descriptor for the other ranks, or none; on all ranks alike. The caller closes it.
        :returns: the file descriptors of all ranks, in rank order
        :raises RuntimeError: if a rank has ended, or does not call in time, or the purposes differ
        """
        own = what.encode()
        enclosed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        gathered = {self._p2p.rank: list(files)}
        waiting, poll = {}, select.poll()
        deadline = time.monotonic() + self._p2p.timeout_s
        try:
            for peer, connection in self._connections.items():
                connection.sendmsg([own], enclosed)
                waiting[connection.fileno()] = peer
                poll.register(connection, select.POLLIN)
            while waiting:
                ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                if not ready:
                    peer = min(waiting.values())
                    raise TimeoutError(f"it did not come {what} within {self._p2p.timeout_s:g} s")
                for descriptor, _ in ready:
                    poll.unregister(descriptor)
                    peer = waiting.pop(descriptor)
                    theirs, received, *_ = self._connections[peer].recvmsg(MESSAGE_BYTES, FILE_BYTES)
                    if not theirs:
                        raise ConnectionResetError("it has closed its connection")
                    if theirs != own:
                        raise RuntimeError(
                            f"on {self._p2p.hosts[peer]}, rank {self._p2p.rank} came {what}, but rank {peer} came "
                            f"{theirs.decode()}: all ranks must all-reduce in the same order tensors of the same size and "
                            "dtype, at the same offset of allocated memory"
                        )
                    gathered[peer] = [file for _, _, data in received for file in array.array("i", data)]
        except OSError as error:
            self.close()  # sums that are queued behind this one fail at once, here and on the other ranks
            raise RuntimeError(f"rank {self._p2p.members[peer]} is lost: {error}") from error
        return [file for peer in sorted(gathered) for file in gathered[peer]]

    def close(self) -> None:
        """Close the connections; ranks that wait for this one see that at once."""
        for connection in self._connections.values():
            connection.close()


def _new_socket(timeout_s: float) -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    new.settimeout(timeout_s)
    return new


def _connect(invitation: bytes, timeout_s: float) -> socket.socket:
    """Connect to the rank that sent this address and secret."""
    connection = _new_socket(timeout_s)
    connection.connect(invitation[:-SECRET_BYTES])
    connection.send(invitation[-SECRET_BYTES:])
    connection.settimeout(None)  # meet() polls instead
    return connection


def _accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """The connection of the invited rank; others, which do not know the secret, are refused."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(listener.gettimeout())
        if connection.recv(SECRET_BYTES) == secret:
            connection.settimeout(None)
            return connection
        connection.close()
