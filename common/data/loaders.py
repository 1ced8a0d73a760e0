"""torch's own ``DataLoader``: its limits are checked before workers start, its errors become one line with advice.

A machine that cannot hold the workers lets them hang or be killed, so it is asked first. ``DataLoader`` reports a killed worker, a full
``/dev/shm`` and too many open files as a ``RuntimeError`` or ``OSError`` from the place where it noticed them. Two things are fixed
in its workers: dead ones are found, stopped ones end quietly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from common.errors import UsageError

MORE_SHARED_MEMORY = (
    "make it larger (in a container, --shm-size or --ipc=host), or use a smaller batch size (--batch-size), "
    "fewer prefetched batches (--prefetch-factor), fewer workers (--workers), or a loader of threads"
)
# The likely reason for each signal that ends a loader process, and the advice.
WORKER_KILLED_BY = {
    signal.SIGKILL: "the kernel does this when memory runs out (see dmesg); use fewer workers or smaller batches",
    signal.SIGBUS: f"shared memory ran out (df /dev/shm); {MORE_SHARED_MEMORY}",
    signal.SIGTERM: "another process asked it to end",
    signal.SIGSEGV: "a library in it crashed; try another decoder (--decoder)",
}


class BadSample(UsageError):
    """A sample that cannot be read, or does not fit the others.

    When a loader worker raises it, ``DataLoader`` makes a new one whose text is the worker's traceback. The message is its last
    line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rstrip().rsplit(f"{type(self).__name__}: ", 1)[-1])


@contextlib.contextmanager
def loader_errors() -> Iterator[None]:
    """Replace a loader's errors by one line that says what to do.

    :raises UsageError: in place of an error that :func:`explain` knows; other errors pass unchanged
    """
    try:
        yield
    except UsageError:
        raise
    except (RuntimeError, OSError, EOFError) as error:
        raise as_user_error(error) from error


def as_user_error(error: Exception) -> UsageError:
    """A loader's error as one line that says what to do. An error that :func:`explain` does not know is raised again."""
    if isinstance(error, UsageError):
        return error
    explanation = explain(error)
    if explanation is None:
        raise error
    _forget_what_was_begun(error)
    return UsageError(explanation)


def _forget_what_was_begun(error: BaseException) -> None:
    """An iterator of torch's that could not be built to its end lives in the error's frames. When it is deleted, it looks for
    attributes that it has not, and Python would print a traceback below our line (torch 2.15)."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        traceback.clear_frames(error.__traceback__)
    finally:
        sys.unraisablehook = hook


def explain(error: BaseException) -> str | None:
    """The line for an error; None for an error of another kind."""
    text = _last_line(str(error))  # above it, an error from a worker has its traceback
    worker = re.search(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly", text)
    if worker:
        return f"loader worker (pid {worker[1]}) {_end_of_worker(error)}"
    if isinstance(error, (OSError, EOFError)) and _in_ipc(error):
        return (
            f"a loader worker ended before it had handed over a batch: most often, {WORKER_KILLED_BY[signal.SIGKILL]}"
        )
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return (
            "too many open files: each prefetched batch holds some; raise the limit (ulimit -n 65536), or use fewer "
            "workers (--workers) or fewer prefetched batches (--prefetch-factor)"
        )
    if "</torch_" in text or text.endswith("No space left on device"):  # a user's own error names the file after that
        return f"shared memory (/dev/shm) is full: {text}; {MORE_SHARED_MEMORY}"
    return None


def _end_of_worker(error: BaseException) -> str:
    """How and why it ended, by its exit code in ``DataLoader``'s frame; the error itself has only the process id."""
    # HACK: the local variable of DataLoader's _try_get_data. Under another name, only the likeliest reason is told.
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    codes = (worker.exitcode for frame in frames for worker in frame.f_locals.get("failed_workers", []))
    code = next(codes, None)
    if code is None:
        return f"was killed: most often, {WORKER_KILLED_BY[signal.SIGKILL]}"
    if code >= 0:
        return f"ended with status {code}: something in it calls sys.exit() or os._exit(), or printed an error above"
    return f"was killed: {WORKER_KILLED_BY.get(signal.Signals(-code), f'by signal {-code}')}"


def _in_ipc(error: BaseException) -> bool:
    """Whether the error comes from requesting a batch's file descriptor from a worker."""
    from multiprocessing import resource_sharer

    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == resource_sharer.__file__ for frame, _ in frames)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


WORKER_BYTES = 12 << 20  # private memory of a forked worker of torch's DataLoader, measured on the glyphs
# Workers send descriptors through a socket in the temporary folder, /tmp/pymp-xxxxxxxx/listener-xxxxxxxx. Linux takes 107
# bytes of its path. torch's workers would report a longer one on stderr, and never send a batch.
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
    if not os.path.isdir("/dev/shm"):
        return
    state = os.statvfs("/dev/shm")
    free = state.f_bavail * state.f_frsize
    if free < needed:
        raise UsageError(
            f"shared memory (/dev/shm) is full: its batches need {needed / 1e6:.1f} MB and {free / 1e6:.1f} MB are left; "
            f"{MORE_SHARED_MEMORY}"
        )


PREFETCH_FACTOR = 2  # DataLoader's own default


def stock_loader(
    dataset: Any,
    workers: int,
    *,
    batch_bytes: int = 0,
    ranks: int = 1,
    loader: type[DataLoader[Any]] = DataLoader,
    **settings: Any,
) -> DataLoader[Any]:
    """Construct a ``DataLoader`` whose dead workers are found and whose stopped workers end quietly.

    :param workers: loader processes; 0 loads in the main process
    :param batch_bytes: bytes of a batch, if it is known; all that are prefetched must fit into ``/dev/shm``
    :param ranks: of this node, each with a loader like this one
    :param loader: ``DataLoader`` or a class derived from it
    :param settings: its other arguments
    :raises UsageError: when shared memory, or memory, is too small for so many workers
    """
    if workers:
        require_room_for_workers(workers, ranks)
        require_short_temporary_folder()
        require_shared_memory(batch_bytes * workers * ranks * settings.get("prefetch_factor", PREFETCH_FACTOR))
    poll_for_deaths()
    return loader(dataset, num_workers=workers, **{"worker_init_fn": start_worker, **settings})


def poll_for_deaths() -> None:
    """Let ``DataLoader`` find dead workers by polling, within five seconds. To be called before workers are started.

    Its SIGCHLD handler would raise an exception at any point of the main thread. In ``Queue.put``, the lock would then stay
    locked, and the process would hang when the loader is closed (torch/utils/data/_utils/signal_handling.py).
    """
    # HACK: torch's own mark that it has set its handler. Under another name, the handler is set, and the hang is back.
    signal_handling._SIGCHLD_handler_set = True


def start_worker(worker: int) -> None:
    """The ``worker_init_fn``: no traceback when the rank is stopped while the worker sends a batch.

    multiprocessing's server of file descriptors would print that of the broken connection.

    :param worker: the worker's number
    """
    report = sys.excepthook
    sys.excepthook = lambda kind, error, trace: (
        None if issubclass(kind, ConnectionError) else report(kind, error, trace)
    )
