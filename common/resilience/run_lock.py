"""One run per directory at a time: the second is refused while the first lives, and not after it died.

A POSIX record lock belongs to a process: the kernel takes it back however the process ends, SIGKILL included, and loader
workers do not inherit it, so that one that outlives its rank for a moment keeps nobody out. (``flock`` belongs to the open
file, which a fork shares.) Shared file systems pass it on to other hosts, if they support locks; if not, it is said.
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
    """Holds a directory until it is closed, or this process ends.

    :raises UsageError: while another process holds it, naming that
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as it is held)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning(f"{folder} cannot be locked ({error.strerror}): nothing keeps a second run out of it")
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
