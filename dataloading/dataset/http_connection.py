"""One HTTP request with limits: a server may be slow, but not for ever, and may send much, but not without end.

A socket's own timeout is of each read: a server that sends one byte every few seconds would never reach it. Here each read may
take only what is left of the whole request's time.
"""

from __future__ import annotations

import base64
import http.client
import io
import socket
import time
import urllib.parse
from typing import Any

TIMEOUT_S = 10.0  # without a byte
TOTAL_S = 60.0  # of a request, to its last byte
PIECE = 1 << 20


class TooLong(Exception):
    """The answer is longer than what may be read."""


class Connection:
    """A connection to one server, opened by the first request and kept for the next; for one thread of one process.

    :param url: of the server; a user and a password in it become the header ``Authorization``
    :param timeout_s: seconds without a byte after which a request fails
    :param total_s: seconds that a whole request may take
    """

    def __init__(self, url: urllib.parse.SplitResult, timeout_s: float = TIMEOUT_S, total_s: float = TOTAL_S) -> None:
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "", url.port, timeout=timeout_s)
        self._timeout_s, self._total_s = timeout_s, total_s
        self._headers: dict[str, str] = {}
        if url.username is not None:
            both = f"{urllib.parse.unquote(url.username)}:{urllib.parse.unquote(url.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(both.encode()).decode('ascii')}"

    def get(self, path: str, most_bytes: int) -> tuple[int, str, bytes]:
        """Returns the status, the server's word for it, and the content.

        :param path: quoted
        :raises TooLong: when the content has more bytes; no more than that were read
        :raises OSError, http.client.HTTPException: when the server does not answer as a server does, or not in time
        """
        deadline = time.monotonic() + self._total_s
        connection: Any = self._connection
        if connection.sock is None:
            connection.connect()
            opened: Any = connection.sock
            connection.sock = _TimedSocket(opened, self._timeout_s)
        timed: _TimedSocket = connection.sock
        timed.deadline = deadline
        connection.request("GET", path, headers=self._headers)
        response = connection.getresponse()
        if response.length is not None and response.length > most_bytes:
            raise TooLong
        content = bytearray()
        while piece := response.read(PIECE):
            content += piece
            if len(content) > most_bytes:
                raise TooLong
        if (
            response.length
        ):  # the server has closed the connection before the end; http.client's read(n) does not say so
            raise http.client.IncompleteRead(bytes(content), response.length)
        return response.status, response.reason, bytes(content)

    def close(self) -> None:
        """The next request opens it again."""
        self._connection.close()

    def __del__(self) -> None:
        self.close()  # Python would warn of an open socket


class _TimedSocket:
    """A socket whose reads end at a deadline. Closed only when the answers that are read from it are closed too, as
    http.client expects of a socket."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self.sock, self.timeout_s = sock, timeout_s
        self.deadline = 0.0
        self._readers = 0
        self._closed = False

    def makefile(self, *arguments: Any) -> io.BufferedReader:
        """For ``http.client.HTTPResponse``."""
        self._readers += 1
        return io.BufferedReader(_TimedReads(self))

    def sendall(self, data: Any) -> None:
        """For ``http.client.HTTPConnection``."""
        self.sock.settimeout(self.remaining())
        self.sock.sendall(data)

    def remaining(self) -> float:
        """Seconds that the next read or write may take.

        :raises TimeoutError: when there are none
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the whole answer did not come in time")
        return min(self.timeout_s, left)

    def reader_is_closed(self) -> None:
        """An answer is read, or given up."""
        self._readers -= 1
        if self._closed and not self._readers:
            self.sock.close()

    def close(self) -> None:
        self._closed = True
        if not self._readers:
            self.sock.close()


class _TimedReads(io.RawIOBase):
    def __init__(self, timed: _TimedSocket) -> None:
        super().__init__()
        self._timed = timed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._timed.sock.settimeout(self._timed.remaining())
        return self._timed.sock.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._timed.reader_is_closed()
