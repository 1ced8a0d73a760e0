"""What this machine is, and how much of it this process may use."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "torchvision", "pillow", "numpy", "matplotlib")


def usable_cores() -> int:
    """Cores that this process may really use: those of its affinity mask, further limited by the cgroup's CPU quota.

    ``os.cpu_count()`` counts the machine's, which in a container or a batch job are mostly somebody else's.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(affinity, int(quota) if quota else affinity))


def _cgroup_quota(root: Path, membership: Path) -> float | None:
    """The smallest CPU quota, in cores, of this process's cgroup (version 2) and of those above it; None without one."""
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


def describe_machine() -> dict[str, object]:
    """The machine and the versions, for the JSON beside every result."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor_name(),
        "usable_cores": usable_cores(),
        "gpus": gpus,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
        "git_commit": git_commit(),
        "command": " ".join(sys.orig_argv),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def git_commit() -> str | None:
    """The commit of the checkout that this file lies in, with ``-dirty`` when it was changed; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # installed inside somebody else's checkout: not ours
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
