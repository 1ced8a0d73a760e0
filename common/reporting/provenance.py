"""Where a result comes from: the machine, the versions, the commit and the command, for the JSON of every result."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from common.machine import usable_cores

PACKAGES = ("torch", "torchvision", "pillow", "numpy", "matplotlib")


def describe_machine() -> dict[str, object]:
    """Describe the machine, the versions and the command, for the JSON of every result."""
    import torch

    from common.gpu.devices import count_gpus, kind_of

    gpus = [kind_of(torch.device("cuda", number)) for number in range(count_gpus())]
    if gpus:
        from common.gpu.report import gpu_software
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor_name(),
        "usable_cores": usable_cores(),
        "gpus": gpus,
        **({"gpu_software": gpu_software()} if gpus else {}),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
        "git_commit": git_commit(),
        "command": " ".join(sys.orig_argv),
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def git_commit() -> str | None:
    """The commit of the checkout that contains this file, with ``-dirty`` if files were changed; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # fails if it is installed inside another project's checkout
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
