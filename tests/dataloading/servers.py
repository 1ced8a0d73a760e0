"""Servers of one connection at a time that answer as no server should: they drip, flood, lie and curse."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

Answer = Callable[[socket.socket, threading.Event], None]
START = b"HTTP/1.1 200 OK\r\n"


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The URL of a server that answers every connection so."""
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve_one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            answer(connection, over)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=serve_one, args=(connection,)))
                threads[-1].start()

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join()
        for thread in threads:
            thread.join()


def sends(content: bytes) -> Answer:
    return lambda connection, over: connection.sendall(content)


def says_nothing(connection: socket.socket, over: threading.Event) -> None:
    over.wait()


def drips(content: bytes, start: bytes = b"") -> Answer:
    """One byte now and then, so that no read waits long."""

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        for byte in content:
            if over.wait(0.02):
                return
            connection.sendall(bytes([byte]))

    return answer


def floods(piece: bytes, start: bytes) -> Answer:
    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        while not over.is_set():
            connection.sendall(piece)

    return answer


# What a server does, and a part of the error that tells of it.
SERVERS: dict[str, tuple[Answer, str]] = {
    "drips its content": (drips(b"x" * 10**6, START + b"Content-Length: 1000000\r\n\r\n"), "TimeoutError: "),
    "drips its header": (drips(START + b"X-Header: " + b"x" * 10**5), "TimeoutError: "),
    "drips its status": (drips(b"HTTP/1.1 200 " + b"K" * 10**5), "TimeoutError: "),
    "continues without end": (floods(b"HTTP/1.1 100 Continue\r\n\r\n" * 100, b""), "cannot be read in 2 tries"),
    "promises 10**18 bytes": (sends(START + b"Content-Length: 1000000000000000000\r\n\r\nxx"), "more bytes"),
    "promises a number that is none": (sends(START + b"Content-Length: many\r\n\r\n" + b"x" * 100), "None"),
    "sends chunks without end": (
        floods(b"10000\r\n" + b"x" * 0x10000 + b"\r\n", START + b"Transfer-Encoding: chunked\r\n\r\n"), "more bytes",
    ),
    "sends bytes without end": (floods(b"x" * 65536, START + b"\r\n"), "more bytes"),
    "sends headers without end": (floods(b"X-Header: x\r\n" * 100, START), "got more than 100 headers"),
    "sends one line without end": (floods(b"x" * 65536, b"HTTP/1.1 200 "), "LineTooLong"),
    "says nothing": (says_nothing, "TimeoutError: "),
    "closes at once": (sends(b""), "RemoteDisconnected"),
    "says nonsense": (sends(b"\x00\xff\x1b[31m nonsense\r\n\r\n"), "BadStatusLine"),
    "curses": (sends(b"HTTP/1.1 404 \x1b[31mred\x07 \x00words\r\nContent-Length: 0\r\n\r\n"), "404"),
    "sends a size of a chunk that is none": (sends(START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nxx"), "tries"),
    "redirects": (sends(b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"), "301 Moved"),
}  # fmt: skip
