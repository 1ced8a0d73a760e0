"""An HTTP server on the loopback that delays files as an object store does.

    python -m dataloading.http_server ~/lfw --latency-ms 20

:func:`serve` runs it beside a benchmark in its own process, so that it shares no GIL with the loader. It ends when its standard
input is closed, which also happens when the process that started it is killed.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.cli import command, option, parse
from common.errors import UsageError
from dataloading.dataset.latency import delay_s
from dataloading.dataset.storage import is_image


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # one connection for many requests
    disable_nagle_algorithm = True  # otherwise the body would wait for the headers' acknowledgement
    wbufsize = 1 << 16  # headers and body in one packet

    def __init__(self, *arguments: object, latency_ms: float, seed: int, directory: str) -> None:
        self._latency_ms, self._seed = latency_ms, seed
        super().__init__(*arguments, directory=directory)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        name = urllib.parse.unquote(self.path).lstrip("/")
        if self._latency_ms and is_image(name):  # listings are not measured
            time.sleep(delay_s(self._latency_ms, self._seed, name))
        super().do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = socket.SOMAXCONN

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect early."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of ``dataloading.http_server``; the folder comes first, without a flag."""

    latency_ms: float = option(0.0, "median delay of each file, log-normal", minimum=0)
    seed: int = option(0, "seed of the delays", minimum=0)
    port: int = option(0, "port on the loopback; 0 takes a free one", minimum=0, maximum=65535)


@command
def main() -> None:
    folder, *arguments = sys.argv[1:] or ["--help"]
    for_help = folder in ("-h", "--help")
    config = parse(ServerConfig, "dataloading.http_server FOLDER", __doc__, ["--help"] if for_help else arguments)
    if not os.path.isdir(folder):
        raise UsageError(f"{folder} is not a folder")
    handler = partial(_Handler, latency_ms=config.latency_ms, seed=config.seed, directory=folder)
    try:
        server = _Server(("127.0.0.1", config.port), handler)
    except OSError as error:
        raise UsageError(f"--port {config.port}: {error.strerror}") from error
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()
    server.shutdown()


@contextlib.contextmanager
def serve(folder: str | Path, latency_ms: float = 0.0, seed: int = 0) -> Iterator[str]:
    """Run a server for the length of the block, and yield its URL.

    :param folder: a local folder
    :param latency_ms: median delay of each file
    :param seed: of the delays
    :raises UsageError: when the server does not start
    """
    command = [sys.executable, "-m", "dataloading.http_server", os.fspath(folder)]
    process = subprocess.Popen(
        [*command, "--latency-ms", str(latency_ms), "--seed", str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the benchmark, which then ends this
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise UsageError(f"the HTTP server for {folder} did not start; its own message is above")
            yield url
        finally:
            process.kill()


if __name__ == "__main__":
    main()
