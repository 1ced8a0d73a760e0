"""The cores that this process may use, of all that the machine has."""

from __future__ import annotations

import os
from pathlib import Path


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
