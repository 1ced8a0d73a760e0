"""Servers that flood, lie, drip and curse, to which a folder of photos points."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.adversary.attempt import Attempt, Scene
from tests.dataloading.servers import SERVERS, START, Answer, answering, sends

LOAD = "tests.adversary.around hasty dataloading.lfw_dataset --path-to-folder {url} --get-timing --output {here}/out"


def served_by(answer: Answer) -> Scene:
    @contextlib.contextmanager
    def scene(here: Path) -> Iterator[Mapping[str, str]]:
        with answering(answer) as url:
            yield {"url": url, "url_with_password": url.replace("//", "//me:secret@")}

    return scene


def page(links: str) -> bytes:
    """A listing of a folder."""
    body = f"<html><body>{links}</body></html>".encode()
    return START + b"Content-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def lists(links: str, then: Answer) -> Answer:
    """A listing for the first request, and another answer to all others."""
    first = threading.Lock()

    def answer(connection: object, over: threading.Event) -> None:
        (sends(page(links)) if first.acquire(blocking=False) else then)(connection, over)  # type: ignore[arg-type]

    return answer


# What the links of a listing may be. Each must lead to photos below the folder, or be passed over.
LISTINGS: list[tuple[str, str]] = [
    ("", r"holds no JPEG"),
    ('<a href="../../../etc/passwd.jpg">x</a>', r"holds no JPEG|passwd"),
    ('<a href="http://127.0.0.1:1/other.jpg">x</a>', r"holds no JPEG"),
    ('<a href="javascript:alert(1)">x</a>', r"holds no JPEG"),
    ('<a href="file:///etc/passwd.jpg">x</a>', r"holds no JPEG"),
    ('<a href="a%00b.jpg">x</a>', r"cannot be read|holds no JPEG"),
    ('<a href="a%0d%0aX-Evil:%201.jpg">x</a>', r"cannot be read|holds no JPEG|tries"),
    ('<a href="' + "x" * 5000 + '.jpg">x</a>', r"cannot be read|holds no JPEG|tries"),
    ('<a href="a.jpg">x</a>' * 3, r"a\.jpg"),
    ("<a href=", r"holds no JPEG"),
    ('\x1b[31m<a href="a.jpg">', r"a\.jpg"),
]

ATTEMPTS = [
    *(
        Attempt(LOAD, r"http://127\.0\.0\.1:\d+", scene=served_by(answer))
        for answer, _ in SERVERS.values()
    ),
    *(
        Attempt(LOAD, line, scene=served_by(lists(links, sends(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"))))
        for links, line in LISTINGS
    ),
    *(
        Attempt(LOAD, r"a\.jpg", scene=served_by(lists('<a href="a.jpg">x</a>', answer)))
        for answer, _ in SERVERS.values()
    ),
    Attempt(
        LOAD.replace("{url}", "{url_with_password}"),
        r"http://me:\*\*\*@127\.0\.0\.1",
        scene=served_by(sends(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")),
    ),
    *(
        Attempt(f"dataloading.lfw_dataset --path-to-folder {url} --get-timing --output {{here}}/out", line)
        for url, line in (
            ("http://127.0.0.1:99999/", r"is no URL"),
            ("http://me:secret@[::1/", r"me:\*\*\*@\[::1"),
            ("'http://a b/'", r"http://a b"),
            ("http://no.such.host.invalid/faces", r"no\.such\.host\.invalid"),
            ("https://127.0.0.1:1/", r"https://127\.0\.0\.1:1"),
            ("file:///nowhere", r"nowhere"),
        )
    ),
]  # fmt: skip
