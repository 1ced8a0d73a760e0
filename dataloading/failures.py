"""What loaders die of, in words.

``DataLoader`` reports a worker that was killed, a full ``/dev/shm`` and too many open files as ``RuntimeError`` or
``OSError`` from wherever they happened to surface.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
from collections.abc import Iterator

from common.cli import UsageError

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
    except (RuntimeError, OSError) as error:
        explanation = explain(error)
        if explanation is None:
            raise
        raise UsageError(explanation) from error


def explain(error: BaseException) -> str | None:
    """The line for an error; None for one that is not of this kind."""
    text = str(error)
    worker = re.search(
        r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (exited unexpectedly|is killed by signal: (\w+))", text
    )
    if worker:
        return f"loader worker (pid {worker[1]}) was killed: {_reason(text)}"
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return (
            "too many open files: each batch on its way holds some; raise the limit (ulimit -n 65536), or use fewer "
            "workers or a smaller --prefetch-factor"
        )
    if "shared memory" in text or "/torch_" in text or "No space left on device" in text:
        return f"shared memory (/dev/shm) is full: {_first_line(text)}; {MORE_SHARED_MEMORY}"
    return None


def _reason(text: str) -> str:
    """DataLoader has the signal's description, if it has anything."""
    known = (reason for number, reason in KILLED_BY.items() if (signal.strsignal(number) or "") in text)
    return next(known, f"most often, {KILLED_BY[signal.SIGKILL]}")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
