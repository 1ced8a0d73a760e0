"""Where the ranks of a host meet: a Unix-domain socket between each two of them, to wait for each other and hand over files.

A rank that sleeps at a socket leaves its core to the others' computation, and learns at once when the other end has gone. The
sockets are in Linux's abstract namespace: nothing is left behind in the file system, whoever is killed whenever.
"""

from __future__ import annotations

import array
import hashlib
import os
import secrets
import select
import socket
import sys
import time
import weakref
from pathlib import Path

import torch

from common.errors import UsageError
from ddp.all_reduce.algorithms import Naive
from ddp.all_reduce.p2p import P2P

MESSAGE_BYTES = 1024
FILE_BYTES = 64  # of ancillary data: room for a descriptor
SECRET_BYTES = 16


class LocalSockets:
    """A Unix-domain socket between each two ranks of a host, for them to wait for each other and hand over files.

    :param p2p: all on one host; to connect them is a collective
    """

    def __init__(self, p2p: P2P) -> None:
        self._peers = p2p
        self._connections: dict[int, socket.socket] = {}
        # A loader worker that is forked later must not hold the connections of its rank when that is killed.
        close = weakref.WeakMethod(self.close)
        os.register_at_fork(after_in_child=lambda: (bound := close()) and bound())

        with _new_socket(p2p.timeout_s) as listener:
            listener.bind("")  # to an abstract address that the kernel chooses, where all on the host could connect
            listener.listen()
            invitation = listener.getsockname() + secrets.token_bytes(SECRET_BYTES)
            try:
                for peer in range(p2p.rank):
                    self._connections[peer] = _connect(_receive(p2p, peer, len(invitation)), p2p.timeout_s)
                for peer in range(p2p.rank + 1, p2p.size):
                    p2p.send(torch.tensor(list(invitation), dtype=torch.uint8), peer)
                    self._connections[peer] = _accept(listener, invitation[-SECRET_BYTES:])
            except OSError as error:
                raise p2p.lost(peer, error) from error

    def meet(self, what: str, *files: int) -> list[int]:
        """Wait until all ranks have come.

        :param what: they come to do
        :param files: a file descriptor that the others get, or none; on all ranks alike, and to be closed by the caller
        :returns: those of all ranks, in rank order
        :raises RankLost: if one has ended, or does not come in time
        :raises RuntimeError: if one comes to do something else
        """
        own = what.encode()
        enclosed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
        gathered = {self._peers.rank: list(files)}
        waiting, poll = {}, select.poll()
        deadline = time.monotonic() + self._peers.timeout_s
        try:
            for peer, connection in self._connections.items():
                connection.sendmsg([own], enclosed)
                waiting[connection.fileno()] = peer
                poll.register(connection, select.POLLIN)
            while waiting:
                ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
                if not ready:
                    peer = min(waiting.values())
                    raise TimeoutError(f"it has not come {what}")
                for descriptor, _ in ready:
                    poll.unregister(descriptor)
                    peer = waiting.pop(descriptor)
                    theirs, received, *_ = self._connections[peer].recvmsg(MESSAGE_BYTES, FILE_BYTES)
                    if not theirs:
                        raise ConnectionResetError("it has closed its connection")
                    if theirs != own:
                        raise RuntimeError(
                            f"of the ranks on {self._peers.hosts[peer]}, {self._peers.rank} has come {what}, and {peer} "
                            f"{theirs.decode()}: all must all-reduce in the same order tensors of the same size and dtype, "
                            "at the same place in allocated memory"
                        )
                    gathered[peer] = [file for _, _, data in received for file in array.array("i", data)]
        except OSError as error:
            raise self._peers.lost(peer, error) from error
        return [file for peer in sorted(gathered) for file in gathered[peer]]

    def close(self) -> None:
        """Those that wait for this rank, or will, see that it has gone."""
        for connection in self._connections.values():
            connection.close()


def _receive(p2p: P2P, source: int, nbytes: int) -> bytes:
    message = torch.empty(nbytes, dtype=torch.uint8)
    p2p.receive(message, source)
    return bytes(message.tolist())


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


def find_hosts(p2p: P2P) -> list[int]:
    """For each rank a number that it shares with those on its host alone: a collective.

    A host is where abstract sockets connect: a network namespace (as each container has) of one boot of one machine.

    :raises UsageError: outside Linux
    """
    if sys.platform != "linux":
        raise UsageError("--all-reduce shared-memory and hierarchical need Linux: use another, such as ring")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    host = f"{socket.gethostname()} {boot} {os.stat('/proc/self/ns/net').st_ino}"
    hosts = torch.zeros(p2p.size, dtype=torch.int64)
    hosts[p2p.rank] = int.from_bytes(hashlib.sha256(host.encode()).digest()[:8], "little", signed=True)
    Naive(p2p).run(hosts)  # each rank has filled in its own
    return hosts.tolist()
