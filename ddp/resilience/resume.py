"""The beginning of a run: whose directory it is, and where it continues.

A run starts anew, or continues from the newest checkpoint that is whole. The settings that identify a run must not have
changed: model, data, global batch, seed and optimizer. All others may, and so may the number of ranks.

torchrun starts a job again after a rank was lost or a node has come or gone, with the same command line, and ``--overwrite`` must not
delete what the job has saved. torchrun counts only the restarts after failures. But its agents live on, one per node, and each
rank is the child of one. If any of this job's agents has worked in the directory before, the job is a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from common.command_line.cli import flag_of
from common.data.datasets import ImageData
from common.device_errors import raise_explained
from common.distributed.dist_env import DistEnv, implementation
from common.distributed.rank_logging import add_log_file
from common.errors import UsageError
from common.files.atomic_files import write_json
from common.files.run_directory import (
    CONFIG_FILE,
    LAUNCH_FILE,
    LOG_FOLDER,
    METRICS_FILE,
    REQUEUE_FILE,
    has_config,
    holds_run,
    prepare,
    read_config,
    require_writable,
    writing,
)
from common.reporting.provenance import describe_machine
from common.signals.stop_request import REQUEUE, SIGNALS
from common.training.precision import set_arithmetic
from ddp.checkpoint import directory, storage
from ddp.checkpoint.storage import Manifest, RunCheckpoint
from ddp.config import LAUNCH_SETTINGS, TrainConfig
from ddp.fast import choose_fastest, why_no_shared_memory

if TYPE_CHECKING:
    import psutil

logger = logging.getLogger(__name__)

# Settings that must be those of the run that wrote the checkpoint.
IDENTITY = (
    "model", "dataset", "min_images_per_person", "image_size", "train_samples", "seed", "batch_size", "optimizer",
    "width", "layers",
)  # fmt: skip


def complete_settings(config: TrainConfig, env: DistEnv) -> TrainConfig:
    """The settings of this start, checked, with all that ``--fast`` leaves open; this rank's device is set to them. A collective.

    :raises UsageError: on every rank, for settings that contradict each other or do not fit the number of ranks
    """
    with env.fail_together():
        config.check(env.world_size)
    if config.fast:
        agents = agents_of(env)
        config = choose_fastest(config, env, env.from_rank_0(lambda: _chosen_before(config, agents)))
    is_open = config.strategy == "torch" and config.all_reduce is None and env.world_size > 1
    if is_open and why_no_shared_memory(env) is None:
        config = dataclasses.replace(config, all_reduce="shared-memory")
        logger.info(
            "gradients are averaged in memory that all ranks share; --all-reduce backend leaves that to the backend"
        )
    set_arithmetic(env.device, config.tf32, config.deterministic, config.cudnn_benchmark)
    return config


def _chosen_before(config: TrainConfig, agents: list[str]) -> dict[str, Any]:
    """The settings of the run that this start continues, if ``--fast`` chose them; else none."""
    before: dict[str, Any] = read_config(config.run_dir).get("config", {}) if how_it_begins(config, agents)[0] else {}
    return before if before.get("fast") else {}


@contextlib.contextmanager
def open_run(config: TrainConfig, env: DistEnv, data: ImageData) -> Iterator[RunCheckpoint | None]:
    """Hold the run's directory, for the length of the block; gives the checkpoint to continue from, if it does. A collective.

    :raises UsageError: on every rank, for a directory that is in use, holds something else, or cannot be written, and for
        a checkpoint of another run or a newer version; on a rank whose device has too little memory for the block
    """
    agents = agents_of(env)
    with contextlib.ExitStack() as held:

        def begin() -> RunCheckpoint | None:
            resume, restarted = how_it_begins(config, agents)
            held.enter_context(prepare(config.run_dir, resume=resume, overwrite=config.overwrite and not restarted))
            (config.run_dir / REQUEUE_FILE).unlink(missing_ok=True)
            # Before there is a run: it is this launch's from its first moment.
            write_json(config.run_dir / LAUNCH_FILE, agents)
            with writing(config.run_dir / storage.FOLDER):
                directory.clean(config.run_dir / storage.FOLDER)
            found = _newest(config, must_exist=config.resume and not restarted) if resume else None
            if found is None:
                write_json(config.run_dir / CONFIG_FILE, describe_run(config, env, data))
            return found

        # Last of all checks, since it may delete the run that was there.
        checkpoint: RunCheckpoint | None = env.from_rank_0(begin)
        with env.fail_together():  # on every node
            require_writable(config.run_dir)
        if not env.is_main and env.local_rank == 0 and not (config.run_dir / CONFIG_FILE).exists():
            logger.warning(
                f"{config.run_dir} on {env.host} is not that of rank 0, which writes the run and its checkpoints: only the logs of "
                "this host's ranks will be here"
            )
        if checkpoint is not None:
            with env.fail_together():
                check_identity(checkpoint.manifest, config, data)
                if env.is_main and not has_config(config.run_dir):
                    logger.warning(f"{config.run_dir / CONFIG_FILE} was damaged: it now has the settings of this start")
                    write_json(config.run_dir / CONFIG_FILE, describe_run(config, env, data))
        add_log_file(env, config.run_dir / LOG_FOLDER)
        try:
            try:
                yield checkpoint
            except (RuntimeError, MemoryError) as error:
                raise_explained(error, env.device, config.less_memory)
                raise
        except UsageError:
            if env.is_main and not any((config.run_dir / name).exists() for name in (METRICS_FILE, storage.FOLDER)):
                # Nothing that one could want to keep: the next start, without the error, finds no run here.
                (config.run_dir / CONFIG_FILE).unlink(missing_ok=True)
            raise
        except SystemExit as end:
            # torchrun's own status is 1, whatever its ranks' was.
            if env.is_main and end.code in (REQUEUE, *(128 + n for n in SIGNALS if n != signal.SIGINT)):
                write_json(config.run_dir / REQUEUE_FILE, {"status": REQUEUE})
            raise


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


def _newest(config: TrainConfig, must_exist: bool) -> RunCheckpoint | None:
    checkpoint = storage.newest(config.run_dir, set_aside=True)
    if checkpoint is None:
        if must_exist:
            raise UsageError(
                f"--resume: {config.run_dir} holds no checkpoint, the run ended before its first: start again with --overwrite"
            )
        return None
    path, manifest = checkpoint
    if manifest.best is not None and not (path.parent / manifest.best).is_dir():  # it was damaged, and set aside
        manifest = dataclasses.replace(manifest, progress={**manifest.progress, "best": None})
    return RunCheckpoint(path, manifest)


def check_identity(manifest: Manifest, config: TrainConfig, data: ImageData) -> None:
    """Refuse to continue as another run, and report what else differs.

    :raises UsageError: for another model, data set, seed, global batch or optimizer, or fewer epochs than are done
    """
    before, now = manifest.config, config.as_json()
    for name in IDENTITY:
        if before.get(name) != now.get(name):
            raise UsageError(
                f"--resume: the run was started with {flag_of(name)} {before.get(name)}, not {now.get(name)}: "
                f"give {flag_of(name)} {before.get(name)}, or another --run-dir"
            )
    if problem := manifest.other_data(len(data.train), data.fingerprint):
        raise UsageError(
            f"--resume: the run was started with other data: {problem}: give its --data-dir, --train-samples and --test-samples, "
            "or another --run-dir"
        )
    if (manifest.epoch, manifest.step_in_epoch) > (config.epochs, 0):
        raise UsageError(
            f"--epochs {config.epochs} is less than the {manifest.epoch} epochs and {manifest.step_in_epoch} steps that the run "
            "has behind it"
        )
    for line in differences(before, config):
        logger.info("resuming with other settings: %s", line)


def differences(before: dict[str, Any], config: TrainConfig) -> list[str]:
    """A line for each setting that differs. Left out are those that say where the run lies and how it begins, and those whose flags
    were not given: they follow from other settings, as the warm-up does from the epochs."""
    now = config.as_json()
    names = [name for name in now if name in before and name not in (*IDENTITY, *LAUNCH_SETTINGS)]
    earlier = dataclasses.replace(config, **{name: before[name] for name in names})
    return [
        f"{flag_of(name)} was {before[name]} and is now {now[name]}"
        for name in names
        if before[name] != now[name] and not (_follows(earlier, name) and _follows(config, name))
    ]


def _follows(config: TrainConfig, name: str) -> bool:
    """Whether a setting has the value that it gets from the others when its flag is not given."""
    not_given: dict[str, Any] = {name: None}
    if TrainConfig.__dataclass_fields__[name].default is not None:
        return False
    try:
        return bool(getattr(dataclasses.replace(config, **not_given), name) == getattr(config, name))
    except UsageError:  # others, as --all-reduce, need it
        return False


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


def how_it_begins(config: TrainConfig, agents: list[str]) -> tuple[bool, bool]:
    """On rank 0: whether this start continues the run in its directory, and whether it is a restart, which always does."""
    begun = holds_run(config.run_dir)
    restarted = begun and is_restart(config.run_dir, agents)
    return config.resume or restarted or (begun and config.auto_resume), restarted


def is_restart(run_dir: Path, agents: list[str]) -> bool:
    """Whether one of the agents has worked in the directory."""
    try:
        before = json.loads((run_dir / LAUNCH_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(before, list) and any(agent in before for agent in agents)
