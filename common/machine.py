"""The machine: the cores that this process may use, and its allocator."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

logger = logging.getLogger(__name__)


def usable_cores(pid: int = 0) -> int:
    """The number of cores that a process may use: those of its affinity mask, limited by this process's cgroup's CPU quota.

    ``os.cpu_count()`` counts all cores of the machine, most of which a container or a batch job may not use.

    :param pid: this process when 0
    :raises OSError: when there is no such process
    """
    affinity = len(os.sched_getaffinity(pid)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(affinity, int(quota) if quota else affinity))


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """The smallest CPU quota of this process's cgroup (version 2) and its parents.

    :param root: the mounted cgroup tree
    :param membership: the file that names this process's cgroup, ``/proc/self/cgroup``
    :returns: in cores; None without a quota
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    quotas = []
    folder = root / own.lstrip("/")
    for level in (folder, *folder.parents):
        limit = level / "cpu.max"
        if limit.is_file():
            quota, period = limit.read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
        if level == root:
            break
    return min(quotas, default=None)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed blocks of up to 32 MiB for the next step.

    By default it returns freed gradients and activations to the kernel, which zeroes each page that it hands out again.
    """
    if set_malloc(trim_threshold=2**31 - 1, mmap_threshold=32 << 20):  # 32 MiB is the most that it takes
        logger.info("malloc keeps freed memory for the next step, in blocks of up to 32 MiB")


def set_malloc(**options: int) -> bool:
    """Set options of glibc's malloc, see mallopt(3); returns False where it is not glibc's.

    :param options: ``trim_threshold`` and ``mmap_threshold`` in bytes
    """
    numbers = {"trim_threshold": -1, "mmap_threshold": -3}  # in malloc.h
    if platform.libc_ver()[0] != "glibc":
        return False
    return all(ctypes.CDLL(None).mallopt(numbers[name], value) for name, value in options.items())
