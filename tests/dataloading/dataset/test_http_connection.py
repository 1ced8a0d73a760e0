"""dataloading/dataset/http_connection.py: servers that drip, flood, lie and curse are given up in one line, in time."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from common.errors import UsageError
from dataloading.dataset import storage
from dataloading.dataset.storage import BadFile, HttpFolder, without_password

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


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRIES", 2)
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(storage, "MOST_BYTES", 1 << 20)


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


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_misbehaves_is_given_up_in_one_line_and_in_time(name: str) -> None:
    answer, words = SERVERS[name]
    with answering(answer) as url:
        began, told = time.monotonic(), "None"
        try:
            HttpFolder(url, timeout_s=0.3, total_s=0.6).open("some.jpg")
        except BadFile as error:
            told = str(error)
        assert time.monotonic() - began < 60  # it ends at all
    assert words in told
    assert told.isprintable()
    if told != "None":
        assert told.startswith(f"{url}/some.jpg ")


def generated(random_: random.Random) -> Answer:
    """A server that does a few things in a random order, few of which are HTTP."""
    parts = [
        START, b"HTTP/1.1 503 x\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n",
        b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"hello", b"\x00\x1b[2J", b"HTTP/1.1 100 Continue\r\n\r\n", b"\xff" * 300,
        b"Connection: close\r\n", b"Content-Encoding: gzip\r\n", b"ffffffffffffffff\r\n", b": : :\r\n", b"x" * 70_000,
    ]  # fmt: skip
    content = b"".join(random_.choices(parts, k=random_.randrange(1, 8)))
    if random_.random() < 0.5:
        content = START + content
    return drips(content) if len(content) < 60 and random_.random() < 0.3 else sends(content)


def test_servers_that_do_anything() -> None:
    for seed in range(100):
        with answering(generated(random.Random(seed))) as url:
            told = "read"
            try:
                HttpFolder(url, timeout_s=0.2, total_s=0.4).open("some.jpg").read()
            except BadFile as error:
                told = str(error)
            assert told.isprintable(), seed


def test_a_password_is_sent_and_never_printed() -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            asked.append(connection.recv(65536))
            answer(connection, threading.Event())

    thread = threading.Thread(target=serve)
    thread.start()
    place = HttpFolder(f"http://me:s3cret%21@127.0.0.1:{port}/faces")
    with pytest.raises(BadFile) as told:
        place.open("a.jpg")
    thread.join()
    listener.close()
    assert b"Authorization: Basic bWU6czNjcmV0IQ==\r\n" in asked[0]  # me:s3cret!
    assert str(told.value).startswith(f"http://me:***@127.0.0.1:{port}/faces/a.jpg cannot be read: the server says 404")
    assert "s3cret" not in place.root


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host/a", "http://host/a"),
        ("http://me:secret@host/a@b:c", "http://me:***@host/a@b:c"),
        ("s3://key:se:cr@et@bucket/x", "s3://key:***@bucket/x"),
        ("ftp://:secret@host", "ftp://:***@host"),
    ],
)
def test_a_url_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_a_url_that_is_none_does_not_print_its_password() -> None:
    for url in ("http://me:secret@host:port/a", "http://me:secret@", "http://me:secret@[::1/a"):
        with pytest.raises(UsageError) as told:
            HttpFolder(url)
        assert "secret" not in str(told.value)
