"""The output of torch's C++ code while a rank joins the job: its lines at once, its pages of stack frames into the log.

For a store that does not answer, torch 2.15 prints some twenty frames at each try, under which the one line that says so is lost.
Python's ``sys.stderr`` knows nothing of them: they are written to file descriptor 2.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

FRAME = re.compile(rb"frame #\d+: |Exception raised from |<omitting python frames>|\s*$")


@contextlib.contextmanager
def frames_to_log(log: Path | None = None) -> Iterator[None]:
    """A block whose stderr goes on without stack frames. If it fails, the whole text is appended to the log.

    :param log: None for no log; its folder is created, unless that were in a folder that others have made
    """
    reader, writer = os.pipe()
    stderr = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    text: list[bytes] = []
    thread = threading.Thread(target=_pass_on, args=(reader, stderr, text), name="native stderr", daemon=True)
    thread.start()
    failed = True
    try:
        yield
        failed = False
    finally:
        os.dup2(stderr, 2)  # the last writer of the pipe is closed, and the thread ends
        thread.join()
        os.close(stderr)
        if failed and log is not None and text:
            _append(log, b"".join(text))


def _pass_on(reader: int, stderr: int, text: list[bytes]) -> None:
    with os.fdopen(reader, "rb") as lines:
        for line in lines:
            text.append(line)
            if not FRAME.match(line):
                with contextlib.suppress(OSError):
                    os.write(stderr, line)


def _append(log: Path, text: bytes) -> None:
    folder = log.parent
    with contextlib.suppress(OSError):  # the error that ends the block is the one to report
        if not folder.parent.exists() or folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with open(log, "ab") as file:
                file.write(text)
