"""What a machine can hold, asked before loader workers are started: afterwards, they hang or are killed."""

from __future__ import annotations

import os
import tempfile

from common.data.loader_errors import MORE_SHARED_MEMORY
from common.errors import UsageError

WORKER_BYTES = 12 << 20  # private memory of a forked worker of torch's DataLoader, measured on the glyphs
# Workers hand over descriptors through a socket in the temporary folder, /tmp/pymp-xxxxxxxx/listener-xxxxxxxx. Linux takes 107
# bytes of its path. torch's workers would report a longer one on stderr, and never hand over a batch.
LONGEST_TEMPORARY_FOLDER = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")


def require_room_for_workers(workers: int, ranks: int = 1) -> None:
    """Check the free memory before workers are started.

    :param workers: of one rank
    :param ranks: of this node, each with as many
    :raises UsageError: when the machine has less than so many workers take
    """
    import psutil  # only for workers

    available = psutil.virtual_memory().available
    if workers * ranks * WORKER_BYTES > available:
        each = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise UsageError(
            f"{workers} loader workers{each} take {workers * ranks * WORKER_BYTES / 1e9:.1f} GB, and {available / 1e9:.1f} GB "
            "are free: use fewer (--workers, or --num-workers); more than the cores of the machine seldom load faster"
        )


def require_short_temporary_folder() -> None:
    """:raises UsageError: when the folder's path is too long for the sockets of ``DataLoader``'s workers"""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY_FOLDER:
        raise UsageError(
            f"TMPDIR {folder} is too long for the sockets of loader workers: use one of at most {LONGEST_TEMPORARY_FOLDER} "
            "bytes, or --workers 0"
        )


def require_shared_memory(needed: int) -> None:
    """Check the free space of ``/dev/shm`` before batches are put there.

    torch does not check it, and leaves partial files behind when the space runs out.

    :param needed: bytes
    :raises UsageError: when fewer bytes are free
    """
    if os.path.isdir("/dev/shm"):
        state = os.statvfs("/dev/shm")
        if state.f_bavail * state.f_frsize < needed:
            raise UsageError(shared_memory_is_full(needed, state.f_bavail * state.f_frsize))


def shared_memory_is_full(needed: int, free: int | None) -> str:
    """The line for batches of so many bytes."""
    left = "" if free is None else f" and {free / 1e6:.1f} MB are left"
    return f"shared memory (/dev/shm) is full: its batches need {needed / 1e6:.1f} MB{left}; {MORE_SHARED_MEMORY}"
