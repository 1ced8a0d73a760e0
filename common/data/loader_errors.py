"""Errors of loaders as one line with advice.

``DataLoader`` reports a killed worker, a full ``/dev/shm`` and too many open files as a ``RuntimeError`` or ``OSError`` from
the place where it noticed them.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import sys
import traceback
from collections.abc import Iterator

from common.errors import UsageError

MORE_SHARED_MEMORY = (
    "make it larger (in a container, --shm-size or --ipc=host), or use a smaller batch size (--batch-size), "
    "fewer prefetched batches (--prefetch-factor), fewer workers (--workers), or a loader of threads"
)
# The likely reason for each signal that ends a loader process, and the advice.
KILLED_BY = {
    signal.SIGKILL: "the kernel does this when memory runs out (see dmesg); use fewer workers or smaller batches",
    signal.SIGBUS: f"shared memory ran out (df /dev/shm); {MORE_SHARED_MEMORY}",
    signal.SIGTERM: "another process asked it to end",
    signal.SIGSEGV: "a library in it crashed; try another decoder (--decoder)",
}


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
        explanation = explain(error)
        if explanation is None:
            raise
        _forget_what_was_begun(error)
        raise UsageError(explanation) from error


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
    text = str(error)
    worker = re.search(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly", text)
    if worker:
        return f"loader worker (pid {worker[1]}) was killed: {_reason(error)}"
    if isinstance(error, (OSError, EOFError)) and _in_hand_over(error):
        return f"a loader worker was killed while it handed over a batch: most often, {KILLED_BY[signal.SIGKILL]}"
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return (
            "too many open files: each prefetched batch holds some; raise the limit (ulimit -n 65536), or use fewer "
            "workers (--workers) or fewer prefetched batches (--prefetch-factor)"
        )
    if "shared memory" in text or "/torch_" in text or "No space left on device" in text:
        return f"shared memory (/dev/shm) is full: {_last_line(text)}; {MORE_SHARED_MEMORY}"
    return None


def _reason(error: BaseException) -> str:
    """Why the worker ended, from its exit code in ``DataLoader``'s frame; the error itself has only the process id."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    dead = [worker for frame in frames for worker in frame.f_locals.get("failed_workers", [])]
    known = (KILLED_BY[signal.Signals(-worker.exitcode)] for worker in dead if -worker.exitcode in KILLED_BY)
    return next(known, f"most often, {KILLED_BY[signal.SIGKILL]}")


def _in_hand_over(error: BaseException) -> bool:
    """Whether the error comes from requesting a batch's file descriptor from a worker."""
    from multiprocessing import resource_sharer

    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == resource_sharer.__file__ for frame, _ in frames)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
