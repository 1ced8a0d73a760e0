"""The beginning of a run: whose directory it is, and where it continues.

A run starts anew, or continues from the newest checkpoint that is whole. The settings that identify a run must not have
changed: model, data, global batch, seed and optimizer. All others may, and so may the number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from common.cli import flag_of
from common.data.datasets import ImageData
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import add_log_file
from common.errors import UsageError
from common.files.atomic_files import write_json
from common.files.run_directory import (
    CONFIG_FILE,
    LOG_FOLDER,
    METRICS_FILE,
    REQUEUE_FILE,
    has_config,
    holds_run,
    prepare,
    require_writable,
)
from common.gpu.devices import implementation
from common.reporting.machine import describe_machine
from common.resilience.device_errors import device_errors
from common.signals.stop_request import REQUEUE, SIGNALS
from ddp.checkpoint import storage
from ddp.checkpoint.storage import Manifest
from ddp.config import LAUNCH_SETTINGS, TrainConfig
from ddp.resilience import restarts

logger = logging.getLogger(__name__)

# Settings that must be those of the run that wrote the checkpoint.
IDENTITY = (
    "model", "dataset", "min_images_per_person", "image_size", "train_samples", "seed", "batch_size", "optimizer",
    "width", "layers",
)  # fmt: skip


class Found(NamedTuple):
    """A checkpoint that is whole."""

    path: Path
    manifest: Manifest


@contextlib.contextmanager
def open_run(config: TrainConfig, env: DistEnv, data: ImageData) -> Iterator[Found | None]:
    """Hold the run's directory, for the length of the block; gives the checkpoint to continue from, if it does. A collective.

    :raises UsageError: on every rank, for a directory that is in use, holds something else, or cannot be written, and for
        a checkpoint of another run or a newer version; on a rank whose device has too little memory for the block
    """
    agents = restarts.agents_of(env)
    with contextlib.ExitStack() as held:
        found: list[Found | None] = [None]
        with env.fail_together():  # last of all checks, since it may delete the run that was there
            if env.is_main:
                begun = holds_run(config.run_dir)
                restarted = begun and restarts.is_restart(config.run_dir, agents)
                resume = config.resume or restarted or (begun and config.auto_resume)
                held.enter_context(prepare(config.run_dir, resume=resume, overwrite=config.overwrite and not restarted))
                (config.run_dir / REQUEUE_FILE).unlink(missing_ok=True)
                # Before there is a run: it is this launch's from its first moment.
                restarts.record(config.run_dir, agents)
                storage.clean(config.run_dir)
                if resume:
                    found[0] = _newest(config, must_exist=config.resume and not restarted)
                if found[0] is None:
                    write_json(config.run_dir / CONFIG_FILE, describe_run(config, env, data))
        with env.fail_together():  # on every node
            require_writable(config.run_dir)
        if not env.is_main and env.local_rank == 0 and not (config.run_dir / CONFIG_FILE).exists():
            logger.warning(
                f"{config.run_dir} on {env.host} is not that of rank 0, which writes the run and its checkpoints: only the logs of "
                "this host's ranks will be here"
            )
        dist.broadcast_object_list(found, src=0, device=env.device)
        if found[0] is not None:
            with env.fail_together():
                check_identity(found[0].manifest, config, data)
                if env.is_main and not has_config(config.run_dir):
                    logger.warning(f"{config.run_dir / CONFIG_FILE} was damaged: it now has the settings of this start")
                    write_json(config.run_dir / CONFIG_FILE, describe_run(config, env, data))
        add_log_file(env, config.run_dir / LOG_FOLDER)
        try:
            with device_errors(env.device, config.less_memory):
                yield found[0]
        except UsageError:
            if env.is_main and not _has_begun(config.run_dir):
                # The next start, without the error, finds no run here.
                (config.run_dir / CONFIG_FILE).unlink(missing_ok=True)
            raise
        except SystemExit as end:
            # torchrun's own status is 1, whatever its ranks' was.
            if env.is_main and end.code in (REQUEUE, *(128 + n for n in SIGNALS if n != signal.SIGINT)):
                write_json(config.run_dir / REQUEUE_FILE, {"status": REQUEUE})
            raise


def _has_begun(run_dir: Path) -> bool:
    """Whether there is anything of a run that one could want to keep."""
    return (run_dir / METRICS_FILE).exists() or (run_dir / storage.FOLDER).exists()


def describe_run(config: TrainConfig, env: DistEnv, data: ImageData) -> dict[str, Any]:
    """The content of ``config.json``."""
    return {
        "config": config.as_json(),
        "world_size": env.world_size,
        "backend": env.backend,
        "process_group": implementation(env.device),
        "device": str(env.device),
        "dataset_fingerprint": data.fingerprint,
        "machine": describe_machine(),
    }


def _newest(config: TrainConfig, must_exist: bool) -> Found | None:
    found = storage.newest(config.run_dir, set_aside=True)
    if found is None and must_exist:
        raise UsageError(
            f"--resume: {config.run_dir} holds no checkpoint, the run ended before its first: start again with --overwrite"
        )
    if found is None:
        return None
    path, manifest = found
    best = manifest.progress["best"]
    if best is not None and not (path.parent / best["name"]).is_dir():  # it was damaged, and set aside
        manifest = dataclasses.replace(manifest, progress={**manifest.progress, "best": None})
    return Found(path, manifest)


def check_identity(manifest: Manifest, config: TrainConfig, data: ImageData) -> None:
    """Refuse to continue as another run, and report what else differs.

    :raises UsageError: for another model, data set, seed, global batch or optimizer, or fewer epochs than are done
    """
    before, now = manifest.config, config.as_json()
    for name in IDENTITY:
        if before.get(name) != now.get(name):  # an older version's run has not all of them
            raise UsageError(
                f"--resume: the run was started with {flag_of(name)} {before.get(name)}, not {now.get(name)}: "
                f"give {flag_of(name)} {before.get(name)}, or another --run-dir"
            )
    if problem := manifest.other_data(len(data.train), data.fingerprint):
        raise UsageError(
            f"--resume: the run was started with other data: {problem}: give its --data-dir, or another --run-dir"
        )
    if (manifest.epoch, manifest.step_in_epoch) > (config.epochs, 0):
        behind = (
            f"{manifest.epoch} epochs and {manifest.step_in_epoch} steps"
            if manifest.step_in_epoch
            else str(manifest.epoch)
        )
        raise UsageError(f"--epochs {config.epochs} is less than the {behind} that the run has behind it")
    for line in differences(before, now):
        logger.info("resuming with other settings: %s", line)


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each setting that differs, but for those that say where the run lies and how it is begun."""
    names = [name for name in now if name in before and name not in (*IDENTITY, *LAUNCH_SETTINGS)]
    # What an older version wrote as False may be None now.
    changed = [name for name in names if (before[name] or None) != (now[name] or None)]
    return [f"{flag_of(name)} was {before[name]} and is now {now[name]}" for name in changed]
