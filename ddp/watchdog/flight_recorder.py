"""torch's flight recorder: what each rank's latest collectives were, in files that can be compared.

torch keeps the latest 2000 collectives of a process in memory (``TORCH_FR_BUFFER_SIZE``): the operation, its sizes, the line of
Python that called it, and whether it has ended. The watchdog writes them down before it ends the process. Afterwards either of ::

    python -m ddp.launch.doctor --dumps runs/NAME/logs
    torchfrtrace --allow-incomplete-ranks runs/NAME/logs/flight-recorder/START

says which ranks did not join which collective. (The flag is for a rank that was stopped or killed, and has written nothing.)
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def write_collectives(folder: Path, rank: int, device: torch.device) -> None:
    """Write this process's collectives as ``rank<r>``, a pickle, in a folder that is for these files alone.

    ProcessGroupNCCL has a recorder of its own. Every other backend has an instance of torch's generic recorder, by its name
    (torch/csrc/distributed/c10d/init.cpp); gloo's is the default, and the only one before torch 2.15.

    :param device: of the rank; its backend is the one whose collectives are written
    :raises OSError: when the file cannot be written
    """
    group = dist.group.WORLD
    assert group is not None
    # HACK: torch has these functions for its own watchdog. If it renames one, this raises, and our watchdog logs that instead.
    recorders = torch._C._distributed_c10d
    backend = group._get_backend(device).name()
    if backend == "nccl":
        trace = recorders._dump_nccl_trace()  # type: ignore[attr-defined]
    elif backend == "gloo":
        trace = _with_names_of_groups(recorders._dump_fr_trace())  # type: ignore[attr-defined, unused-ignore]
    else:
        trace = recorders._dump_fr_trace(backend=backend)  # type: ignore[attr-defined, unused-ignore]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}").write_bytes(trace)


def _with_names_of_groups(trace: bytes) -> bytes:
    """torch 2.15's gloo records its groups before they have a name, so that ``torchfrtrace`` finds none of their collectives."""
    recorded = pickle.loads(trace)
    # HACK: no public name lists the groups of this process. If torch renames it, this raises, as above.
    ranks_of = distributed_c10d._world.pg_group_ranks
    recorded["pg_config"] = {
        name: {"name": name, "desc": group.group_desc, "ranks": str(sorted(ranks_of[group]))}
        for group, name in distributed_c10d._world.pg_names.items()
    }
    return pickle.dumps(recorded)
