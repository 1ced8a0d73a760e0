"""When a checkpoint is written, and by which rank.

Rank 0 writes, because all ranks hold the same weights. The state that differs between ranks is gathered first. If the model is
sharded, each rank writes its own part (shards.py).

With ``--async-checkpoint``, training waits only until rank 0 has a copy in the host's memory. A thread writes the copy while
training continues, and the next checkpoint begins only after that thread has ended.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.files.run_directory import writing
from common.training.metrics import MetricsWriter
from common.training.optimization import STATE_OF, local
from ddp.checkpoint import directory, storage
from ddp.checkpoint.state import copy_on_host, manifest_of, saved_buffers, state_of_job, state_of_rank
from ddp.checkpoint.storage import Manifest
from ddp.config import TrainConfig
from ddp.job import Job


def require_room(job: Job) -> None:
    """Look whether the disk has room for a checkpoint, before the first step. On rank 0, which writes into the directory.

    :raises UsageError: when there is too little
    """
    config = job.config
    entries = STATE_OF[type(job.optimizer)].values() if config.momentum or config.optimizer != "sgd" else ()
    own = sum(local(parameter).nbytes for parameter in job.network.parameters())
    size = own * (1 + sum(entries)) * (job.env.world_size if config.is_sharded else 1)
    free = shutil.disk_usage(config.run_dir).free
    if free < size:
        raise UsageError(
            f"{config.run_dir} has {free / 1e6:,.1f} MB free, and a checkpoint takes {size / 1e6:,.1f}: make room, or give another "
            "--run-dir"
        )


class Checkpointer:
    """Writes a run's checkpoints. :meth:`save` and :meth:`finish` are collectives.

    :param metrics: synced before each checkpoint, so that no checkpoint is ahead of the metrics on the disk
    :param may_write: called on rank 0 before each checkpoint; it raises a UsageError if the directory is no longer this run's
    """

    def __init__(
        self, config: TrainConfig, env: DistEnv, metrics: MetricsWriter, may_write: Callable[[], None] = lambda: None
    ) -> None:
        self._may_write = may_write
        self._config, self._env, self._metrics = config, env, metrics
        self._every_steps, self._every_seconds = config.checkpoint_interval
        self._count_time()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def due(self, step: int) -> bool:
        """True on every rank when ``--checkpoint-every`` is a number of steps and this is a multiple of it."""
        return self._every_steps is not None and step % self._every_steps == 0

    def _count_time(self) -> None:
        """Set ``due_at``, by ``time.monotonic()``: on rank 0, when the checkpoint interval elapses; else never."""
        timed = self._env.is_main and self._every_seconds is not None
        self.due_at = time.monotonic() + (self._every_seconds or 0.0) if timed else math.inf

    def save(self, job: Job, *, wait: bool = False) -> None:
        """Write the job's state. A collective.

        :param wait: return only when it is on the disk, also with ``--async-checkpoint``
        :raises UsageError: on every rank, when this checkpoint or the previous one could not be written
        """
        sharded = job.config.is_sharded
        job.watchdog.at(job.step, "checkpoint")
        ranks: list[Any] = [None] * self._env.world_size
        dist.all_gather_object(ranks, state_of_rank(job))
        with job.watchdog.paused():  # a disk may take longer than a collective may
            with self._env.fail_together():
                if self._env.is_main:
                    self._join()
                    if job.user_error is not None:  # the metrics of this step may have failed to be written
                        raise job.user_error
                    if sharded:
                        self._begin()
                    else:
                        self._write_for_all(job, ranks, wait)
            if sharded:
                self._write_together(job, ranks)
        self._count_time()

    def finish(self) -> None:
        """Wait until the last checkpoint and the metrics are on the disk. A collective.

        :raises UsageError: on every rank, when they could not be written
        """
        with self._env.fail_together():
            self._join()
            self._metrics.sync()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()  # if the run has failed, its last checkpoint is completed

    def _write_for_all(self, job: Job, ranks: list[Any], wait: bool) -> None:
        """Rank 0 writes, or starts a thread that does."""
        manifest, state = manifest_of(job), state_of_job(job, ranks)
        if self._config.async_checkpoint and not wait:
            self._writing = self._thread.submit(self._write, manifest, copy_on_host(state, self._env.device))
        else:
            self._write(manifest, state)

    def _write(self, manifest: Manifest, state: dict[str, Any]) -> None:
        self._begin()
        storage.write(self._config.run_dir, manifest, state)
        self._prune(manifest)

    def _write_together(self, job: Job, ranks: list[Any]) -> None:
        """Each rank writes its part."""
        from ddp.checkpoint.sharded_state import state_of_shard, write_together  # only for a sharded model

        manifest = manifest_of(job)
        own = state_of_shard(job.network, job.optimizer, saved_buffers(job, ranks), self._env.is_main)
        path = self._config.run_dir / storage.FOLDER / manifest.name
        write_together(path, manifest.step, manifest.facts(), own, {"ranks": ranks}, self._env)
        with self._env.fail_together():
            if self._env.is_main:
                self._prune(manifest)

    def _begin(self) -> None:
        self._metrics.sync()
        self._may_write()

    def _prune(self, manifest: Manifest) -> None:
        folder = self._config.run_dir / storage.FOLDER
        with writing(folder):
            directory.prune(folder, self._config.keep_last, keep=[manifest.best] if manifest.best else ())

    def _join(self) -> None:
        """:raises UsageError: when the last checkpoint could not be written"""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
