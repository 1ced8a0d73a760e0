"""One run per directory at a time: a second run is refused as long as the first one lives.

A POSIX record lock belongs to a process. The kernel releases it however the process ends, SIGKILL included. Loader workers
do not inherit it, so a worker that outlives its rank for a moment does not keep the lock. (``flock`` belongs to the open
file, which a fork shares.) Shared file systems enforce the lock on other hosts, if they support locks; if not, a warning
says so.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from common.errors import UsageError

LOCK_FILE = "lock"

logger = logging.getLogger(__name__)


class RunLock:
    """Locks a directory until it is closed, or this process ends.

    :raises UsageError: naming the process that holds the lock
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as the lock is held)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(f"{folder} cannot be locked ({error.strerror}): a second run in it is not refused")
                return
            raise UsageError(
                f"--run-dir {folder} is in use by {holder}: wait for it or stop it, or give another directory"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
