"""Disks, shared memory and files that are too small, locked or damaged.

    python -m tests.support.harm.disk LIMIT COMMAND ARGUMENTS

sets a limit of its own process, such as ``full_disk`` or ``small_shared_memory``, and runs ``python -m COMMAND ARGUMENTS``. A
command that begins with the path of Python is started as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import load_command

CLONE_NEWNS = 0x00020000


# Disks of all processes


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs of ``size`` in ``folder``; gives a function that changes its size."""
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield lambda size: _mount("-o", f"remount,size={size}", str(folder))
    finally:
        _unmount(folder)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in ``folder`` can be created, renamed or removed; even by root, whom no permission stops."""
    _mount("--bind", str(folder), str(folder))
    try:
        _mount("-o", "remount,bind,ro", str(folder), busy_s=10.0)  # it has to wait for a file that is being written
        yield
    finally:
        _unmount(folder)


def _mount(*arguments: str, busy_s: float = 0.0) -> None:
    """:param busy_s: how long to try while something is in the way"""
    deadline = time.monotonic() + busy_s
    while (mounting := subprocess.run(["mount", *arguments], capture_output=True, text=True)).returncode:
        if "busy" not in mounting.stderr or time.monotonic() > deadline:
            pytest.skip(f"nothing can be mounted here: {mounting.stderr.strip()}")
        time.sleep(0.005)


def _unmount(folder: Path) -> None:
    """Even if a process still has a file there: it goes with that."""
    subprocess.run(["umount", "--lazy", folder], check=True)


# Limits of one process and those that it starts


def few_files() -> None:
    """Open files: at most ten more than now."""
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 10, now + 10))


def small_files() -> None:
    """Files: none may grow beyond 100 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def no_folder() -> None:
    """The current folder is removed."""
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()


def no_temporary_folder() -> None:
    """No folder for temporary files."""
    os.environ["TMPDIR"] = "/nowhere"
    tempfile.tempdir = None


def small_shared_memory() -> None:
    """A /dev/shm of 64 kB, which no other process sees."""
    _mount_here("/dev/shm", "64k")


def tiny_shared_memory() -> None:
    """A /dev/shm of 8 kB."""
    _mount_here("/dev/shm", "8k")


def full_disk() -> None:
    """The run's directory on a disk of 300 kB."""
    Path("run").mkdir(exist_ok=True)
    _mount_here("run", "300k")


def read_only_disk() -> None:
    """The run's directory on a disk that cannot be written."""
    Path("run").mkdir(exist_ok=True)
    _mount_here("run", "300k,ro")


NEED_MOUNTS = ("small_shared_memory", "tiny_shared_memory", "full_disk", "read_only_disk")


def _mount_here(folder: str, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace can be made here")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={options}", "tmpfs", folder], check=True)


@functools.cache
def can_mount() -> bool:
    """Whether this process may make mount namespaces."""
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--mount", "true"], capture_output=True).returncode == 0


# Files


def flip_bit(path: Path, offset: int) -> None:
    """Flip the lowest bit of the byte at ``offset``."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


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


def main() -> None:
    limit, program, *arguments = sys.argv[1:]
    if program == sys.executable:
        globals()[limit]()
        os.execv(program, [program, *arguments])
    run = load_command(program, *arguments)  # before the limit, which its imports might not fit
    globals()[limit]()
    run()


if __name__ == "__main__":
    main()
