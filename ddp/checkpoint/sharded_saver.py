"""A checkpoint that all ranks write together: each its own part, all into one folder, which gets its name when it is complete."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.files.run_directory import writing
from ddp.checkpoint import directory, folder
from ddp.checkpoint.folder import SHARDED_FORMAT
from ddp.checkpoint.pieces import shard_key
from ddp.checkpoint.storage import FOLDER, Manifest


def write_together(run_dir: Path, manifest: Manifest, own: Any, shared: Mapping[str, Any], env: DistEnv) -> None:
    """Write a sharded checkpoint; one of the same name is replaced. A collective.

    :param manifest: only rank 0's is written
    :param own: what this rank writes, see :func:`ddp.checkpoint.pieces.shard_content`
    :param shared: further entries, which rank 0 writes
    :raises UsageError: on every rank, when one cannot write; earlier checkpoints are untouched
    """
    path = run_dir / FOLDER / manifest.name
    with contextlib.ExitStack() as at_the_end:
        scratch: list[Any] = [None]
        with env.fail_together():
            if env.is_main:
                with writing(path):
                    scratch[0] = at_the_end.enter_context(directory.scratch_in(path.parent))
                    scratch[0].mkdir()
        dist.broadcast_object_list(scratch, src=0, device=env.device)
        entries: dict[str, tuple[int, str]] = {}
        with env.fail_together():
            if not scratch[0].is_dir():
                raise UsageError(
                    f"--run-dir {run_dir} on {env.host} is not that of rank 0: every rank of --strategy zero1, zero2, zero3 and "
                    "fsdp2 writes its part there, so give a directory that all hosts share"
                )
            with writing(path):
                key = shard_key(env.rank, env.world_size)
                entries[key] = folder.write_entry(scratch[0], key, own)
        everyone: list[Any] = [None] * env.world_size
        dist.all_gather_object(everyone, entries)
        with env.fail_together():
            if env.is_main:
                with writing(path):
                    entries = {key: found for one in everyone for key, found in one.items()}
                    for key, content in shared.items():
                        entries[key] = folder.write_entry(scratch[0], key, content)
                    folder.complete(scratch[0], manifest.step, manifest.facts(), entries, SHARDED_FORMAT)
                    directory.move_into_place(scratch[0], path)
