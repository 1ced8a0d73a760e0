"""Whether torchrun has started this job for the first time, or again after a rank was lost or a node has come or gone.

The command line is the same in both cases, and ``--overwrite`` must not delete what the job has saved. torchrun counts only
the restarts after failures, and not those after a change of nodes. But its agents live on, one per node, and each rank is
the child of one. If any of this job's agents has worked in the directory before, the job is a restart.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from common.distributed.process_group import DistEnv
from common.files.atomic_files import write_json
from common.files.run_directory import LAUNCH_FILE, read_regular

if TYPE_CHECKING:
    import psutil


def agents_of(env: DistEnv) -> list[str]:
    """All agents of this job; none for ranks that torchrun has not started. A collective."""
    agent = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import psutil  # not at the top, for a quick --help

        parents = psutil.Process().parents()
        for parent in [process for process in parents if _is_torchrun(process)][:1] or parents[:1]:
            agent = f"{env.host}, process {parent.pid} since {_start_of(parent)}"  # a number alone may come again
    agents: list[str | None] = [None] * env.world_size
    dist.all_gather_object(agents, agent)
    return sorted({name for name in agents if name is not None})


def _is_torchrun(process: psutil.Process) -> bool:
    """The rank's parent may be a script that torchrun has started."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return any(Path(part).name == "torchrun" or part.startswith("torch.distributed.") for part in process.cmdline())
    return False


def _start_of(process: psutil.Process) -> str:
    """When it began, by a clock that cannot be set: Linux's ticks since boot (proc(5), field 22 of stat)."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return str(process.create_time())


def is_restart(run_dir: Path, agents: list[str]) -> bool:
    """Whether one of the agents has worked in the directory."""
    try:
        before = json.loads(read_regular(run_dir / LAUNCH_FILE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(before, list) and any(agent in before for agent in agents)


def record(run_dir: Path, agents: list[str]) -> None:
    """Remember the agents, for rank 0 to do."""
    write_json(run_dir / LAUNCH_FILE, agents)
