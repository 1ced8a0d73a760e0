"""Something else in the place of a file."""

from __future__ import annotations

import os
from pathlib import Path


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    """Opening it waits for a process that writes."""
    path.unlink()
    os.mkfifo(path)


def a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_stem("nowhere"))


def a_device(path: Path) -> None:
    """Reading it does not end."""
    path.unlink()
    path.symlink_to("/dev/zero")
