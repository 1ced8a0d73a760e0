"""What loaders die of, in words.

``DataLoader`` reports a worker that was killed, a full ``/dev/shm`` and too many open files as ``RuntimeError`` or
``OSError`` from wherever they happened to surface.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import traceback
from collections.abc import Iterator
from multiprocessing import resource_sharer

from common.errors import UsageError

MORE_SHARED_MEMORY = (
    "make it larger (in a container, --shm-size or --ipc=host), or use a smaller --batch-size, a smaller "
    "--prefetch-factor, fewer --workers, or a loader of threads"
)
# What a loader process died of, and what to do.
KILLED_BY = {
    signal.SIGKILL: "the kernel does this when memory runs out (see dmesg); use fewer workers or smaller batches",
    signal.SIGBUS: f"shared memory ran out (df /dev/shm); {MORE_SHARED_MEMORY}",
    signal.SIGTERM: "somebody asked it to end",
    signal.SIGSEGV: "a library in it crashed; try another --decoder",
}


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn such errors into a line that says what to do.

    :raises UsageError: in their place; other errors pass as they are
    """
    try:
        yield
    except UsageError:
        raise
    except (RuntimeError, OSError, EOFError) as error:
        explanation = explain(error)
        if explanation is None:
            raise
        raise UsageError(explanation) from error


def explain(error: BaseException) -> str | None:
    """The line for an error; None for one that is not of this kind."""
    text = str(error)
    worker = re.search(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly", text)
    if worker:
        return f"loader worker (pid {worker[1]}) was killed: {_reason(error)}"
    if isinstance(error, (OSError, EOFError)) and _in_hand_over(error):
        return f"a loader worker was killed while it handed over a batch: most often, {KILLED_BY[signal.SIGKILL]}"
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return (
            "too many open files: each batch on its way holds some; raise the limit (ulimit -n 65536), or use fewer "
            "workers or a smaller --prefetch-factor"
        )
    if "shared memory" in text or "/torch_" in text or "No space left on device" in text:
        return f"shared memory (/dev/shm) is full: {_first_line(text)}; {MORE_SHARED_MEMORY}"
    return None


def _reason(error: BaseException) -> str:
    """What ended the worker: ``DataLoader`` knew its process when it raised the error, but names only its number."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    dead = [worker for frame in frames for worker in frame.f_locals.get("failed_workers", [])]
    known = (KILLED_BY[signal.Signals(-worker.exitcode)] for worker in dead if -worker.exitcode in KILLED_BY)
    return next(known, f"most often, {KILLED_BY[signal.SIGKILL]}")


def _in_hand_over(error: BaseException) -> bool:
    """Whether it came from asking a worker for the file descriptor of a batch."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == resource_sharer.__file__ for frame, _ in frames)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
