"""dataloading/dataset/http_connection.py: servers that drip, flood, lie and curse are given up in one line, in time."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from common.errors import UsageError
from dataloading.dataset import storage
from dataloading.dataset.storage import BadFile, HttpFolder, without_password
from tests.dataloading.servers import SERVERS, START, Answer, answering, drips, sends


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRIES", 2)
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(storage, "MOST_BYTES", 1 << 20)


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
