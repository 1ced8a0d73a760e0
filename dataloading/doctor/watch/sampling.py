"""A profile: every few milliseconds a thread looks at which line of the script the main thread is, and at what that calls.

The thread ends before a fork and begins again after it, so that no child is made while it holds a lock.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

from .events import frames, is_own, line_of, path_of, watched

INTERVAL_S = 0.005
WRITE_S = 0.25  # between two writes: a run of some seconds shows whether memory goes on to grow
LOOK_SHARE = 0.01  # of the time, for looks at all pages of memory
PAGE = os.sysconf("SC_PAGE_SIZE")
FETCH = "torch.utils.data._utils.fetch"
BUSY = 0.1  # of the main thread's processor time, with which another thread counts


class Sampler:
    """The profile of this process. A sample weighs the time since the one before, since the thread may have waited for the GIL.

    :ivar seconds: by loader, phase (``getitem`` or ``collate``), line of the script, and the innermost
        function below it
    :ivar memory: at times, the bytes that are resident, and those of them that no other process shares
    :ivar loader: the one that the main thread has asked last
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew, also in a forked process, in which there is no thread."""
        self.seconds = defaultdict[tuple[int, str, str, str], float](float)
        self.memory: list[tuple[int, int]] = []
        self.loader = -1
        self._private, self._look_at = 0, 0.0
        self._late, self._woke = 0.0, time.monotonic()
        self._thread: threading.Thread | None = None
        self._task = 0  # the thread's number, also after its end
        self._stop = threading.Event()

    def start(self) -> None:
        if self._thread is None and watched():
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="loader-doctor", daemon=True)
            self._thread.start()
            self._task = self._thread.native_id or 0

    def stop(self) -> None:
        """Let the thread end; it holds no lock afterwards."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def late(self) -> float:
        """Seconds by which the thread has woken too late, since other threads or programs used the cores."""
        return self._late + max(0.0, time.monotonic() - self._woke - 2 * INTERVAL_S)

    def finish(self) -> None:
        """End the thread, and write all of it."""
        self.stop()
        self._look_at = 0.0
        self.write()

    def write(self) -> None:
        """Write all of it, to be read at any time. Pages that are not shared are counted seldom, since that may take long."""
        now, began = time.monotonic(), time.thread_time()  # of the thread, since others' turns are no cost of a look
        if now >= self._look_at:
            self._private = _private()
            self._look_at = now + (time.thread_time() - began) / LOOK_SHARE
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        self.memory.append((resident, self._private))
        content = {
            "seconds": [[*place, seconds] for place, seconds in self.seconds.items()],
            "memory": self.memory,
            "busy_threads": _busy_threads(self._task),
        }
        Path(path_of("profile.new")).write_text(json.dumps(content))
        os.replace(path_of("profile.new"), path_of("profile"))

    def _run(self) -> None:
        main, written = threading.main_thread().ident or 0, 0.0
        self._woke = time.monotonic()
        while not self._stop.wait(INTERVAL_S) and watched():
            # No name for the frame: while the thread waits, it would keep what the script's functions have let go.
            place, now = _place(sys._current_frames().get(main)), time.monotonic()
            if place:
                self.seconds[(self.loader, *place)] += now - self._woke
            self._late, self._woke = self.late(), now
            if now - written > WRITE_S:
                self.write()
                written = self._woke = time.monotonic()


def _place(innermost: FrameType | None) -> tuple[str, str, str] | None:
    """The phase, the innermost line of the script within it, and the innermost function if that is another; None outside."""
    own, phase = None, "getitem"
    for frame in frames(innermost):
        code = frame.f_code
        if own is None and is_own(code.co_filename):
            own = frame
        if code.co_name == "timed_collate":
            phase = "collate"
        if innermost and code.co_name == "fetch" and frame.f_globals.get("__name__") == FETCH:
            function = "" if innermost is own else f"{innermost.f_globals.get('__name__')}.{innermost.f_code.co_name}"
            return phase, line_of(own), function
    return None


def _private() -> int:
    """Bytes of memory that no other process shares."""
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private"))
    return 0


def _busy_threads(ours: int) -> int:
    """Threads that compute and are none of Python's, such as those of OpenMP and OpenCV.

    :param ours: the sampler's own, which may still be there after it has been joined
    """
    ticks = {}
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    least = max(BUSY * ticks.get(os.getpid(), 0), 5)
    python = {ours, *(thread.native_id for thread in threading.enumerate())}
    return sum(count >= least for task, count in ticks.items() if task not in python)


sampler = Sampler()
_running_before_fork = False


def _before_fork() -> None:
    global _running_before_fork
    _running_before_fork = sampler._thread is not None and threading.current_thread() is not sampler._thread
    if _running_before_fork:
        sampler.stop()


def _after_fork() -> None:
    if _running_before_fork:
        sampler.start()


@atexit.register
def _at_exit() -> None:
    sampler.stop()  # while Python shuts down, a thread that still runs may abort the process
    if sampler.seconds and watched():
        sampler.finish()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=sampler.forget)
