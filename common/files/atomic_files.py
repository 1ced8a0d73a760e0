"""Files that are written whole or not at all, and that survive a power cut once they are written.

Each is written under a scratch name, synced to the disk, and renamed. A rename is atomic: a reader finds the old file or
the new one. The folder is synced last, because it holds the name.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SCRATCH = re.compile(r"\.(.+\.)?[0-9a-f]{32}")  # names of unfinished files


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it to the disk at the end of the block.

    :raises OSError: when it exists or cannot be written; a part of it may be left
    """
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a scratch file for writing, and let it take the place of ``path`` if the block ends without an error.

    :raises OSError: when it cannot be written; the old file is untouched
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with new_file(scratch) as file:
            yield file
        os.replace(scratch, path)
    finally:
        with contextlib.suppress(OSError):  # the error that ends the block is the one to report
            scratch.unlink()
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically.

    :raises OSError: when it cannot be written; the old file is untouched
    """
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically; objects that are not JSON, such as paths, become strings.

    :raises OSError: when it cannot be written; the old file is untouched
    """
    write_bytes(path, (json.dumps(content, indent=2, default=str) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
