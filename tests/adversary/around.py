"""Commands within limits: ``python -m tests.adversary.around LIMIT COMMAND ARGUMENTS`` sets the limit and runs the command."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.commands import load_command

CLONE_NEWNS = 0x00020000
NEED_MOUNTS = ("small_shared_memory", "full_disk", "read_only_disk")


def few_files() -> None:
    """Open files: at most ten more than now."""
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 10, now + 10))


def small_files() -> None:
    """Files: none may grow beyond 100 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def no_folder() -> None:
    """The current folder is removed."""
    folder = Path("gone")
    folder.mkdir()
    os.chdir(folder)
    Path("../gone").rmdir()


def small_shared_memory() -> None:
    """A /dev/shm of 64 kB, which no other process sees."""
    _mount("/dev/shm", "64k")


def full_disk() -> None:
    """The run's directory on a disk of 300 kB."""
    Path("run").mkdir(exist_ok=True)
    _mount("run", "300k")


def read_only_disk() -> None:
    """The run's directory on a disk that cannot be written."""
    Path("run").mkdir(exist_ok=True)
    _mount("run", "300k,ro")


def no_temporary_folder() -> None:
    """No folder for temporary files."""
    os.environ["TMPDIR"] = "/nowhere"
    import tempfile

    tempfile.tempdir = None


def _mount(folder: str, options: str) -> None:
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


def main() -> None:
    limit, module, *arguments = sys.argv[1:]
    run = load_command(module, *arguments)
    globals()[limit]()
    run()


if __name__ == "__main__":
    main()
