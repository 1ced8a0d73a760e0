"""Whether other programs used the cores while a benchmark measured: then it gives no verdict.

The kernel counts the idle time of each core (proc_stat(5)) and the processor time of each process. Where a core was neither idle
nor worked for the benchmark, it worked for other programs, or for another guest of its host.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from common.machine import usable_cores

logger = logging.getLogger(__name__)

LEAST_FREE = 0.9  # share of the usable cores that must be free of other programs


class OtherWork:
    """Looks at what other programs do from its construction on."""

    def __init__(self) -> None:
        self._began = _counters()

    def doubt(self) -> str | None:
        """See :func:`doubt`, which judges the time since the construction."""
        seconds, idle, own = (now - before for now, before in zip(_counters(), self._began, strict=True))
        return doubt(seconds, idle + own, usable_cores())

    def warn(self) -> None:
        """Log the doubt, if there is one."""
        if line := self.doubt():
            logger.warning(line)


def doubt(seconds: float, free: float, cores: int) -> str | None:
    """A line that says why the numbers of a measurement may be wrong; None if its cores were free.

    :param seconds: its length
    :param free: core seconds that were idle or the benchmark's own. (With a quota of a cgroup they may be more than it can use.)
    :param cores: the cores that the benchmark may use
    """
    if free >= LEAST_FREE * cores * seconds:
        return None
    return (
        f"other programs left {free / seconds:.1f} of {cores} cores to this benchmark, so its numbers may be wrong: repeat it "
        "on an idle machine"
    )


def _counters() -> tuple[float, float, float]:
    """Seconds of the clock, idle seconds of this process's cores, and processor seconds of the benchmark's processes."""
    import psutil

    # Under torchrun, all ranks of a node are children of its agent.
    root = psutil.Process(os.getppid() if "RANK" in os.environ else None)
    own = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended; its parent counts it
            own += sum(process.cpu_times()[:4])  # user and system, and those of children that have ended
    cores = psutil.Process().cpu_affinity() if hasattr(os, "sched_getaffinity") else range(usable_cores())
    times = psutil.cpu_times(percpu=True)
    idle = sum(times[core].idle + getattr(times[core], "iowait", 0.0) for core in cores if core < len(times))
    return time.perf_counter(), idle, own
