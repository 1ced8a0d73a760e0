"""Continue a loop of one's own where rank 0's newest checkpoint ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.distributed.dist_env import DistEnv
from ddp.checkpoint.directory import newest
from ddp.checkpoint.folder import load


def resume(directory: str | Path, parts: Mapping[str, Any]) -> int:
    """Load the newest checkpoint that rank 0 finds, on all ranks: another host may not have the folder. A collective.

    :param parts: what has a ``load_state_dict()``, by the names under which :func:`ddp.checkpoint.save` got its state
    :returns: the checkpoint's step; 0 if there is none
    :raises UsageError: on every rank, when all checkpoints are damaged
    """

    def read() -> tuple[int, dict[str, Any]]:
        checkpoint = newest(directory, set_aside=True)
        if checkpoint is None:
            return 0, {}
        return checkpoint.step, {name: load(checkpoint.path, name) for name in parts}

    step, states = DistEnv.of_group().from_rank_0(read)
    for name, state in states.items():
        parts[name].load_state_dict(state)
    return int(step)
