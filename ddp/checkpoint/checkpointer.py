"""When a checkpoint is written, and by whom.

Rank 0 writes, since all ranks hold the same weights; what differs between ranks is gathered first. In the background
(``--async-checkpoint``) the training waits only until rank 0 has a copy: a thread encodes, hashes and syncs it while the next
steps are taken, and is done before the next checkpoint begins.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from common.distributed.process_group import DistEnv
from common.training.metrics import MetricsWriter
from ddp.checkpoint import storage
from ddp.checkpoint.manifest import Manifest
from ddp.checkpoint.state import manifest_of, state_of_job, state_of_rank
from ddp.config import TrainConfig
from ddp.job import Job


class Checkpointer:
    """A run's checkpoints. All ranks make one, and call :meth:`save` and :meth:`finish` together.

    :param metrics: synced before each checkpoint: it must not be ahead of the records that led to it
    """

    def __init__(self, config: TrainConfig, env: DistEnv, metrics: MetricsWriter) -> None:
        self._config, self._place, self._metrics = config, env, metrics
        self._every_steps, self._every_seconds = config.checkpoint_interval
        self._saved_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._copy: Any = None  # of the last save; its memory is used again

    def due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this optimizer step, by the count of steps: the same on all ranks."""
        return self._every_steps is not None and step % self._every_steps == 0

    def overdue(self) -> bool:
        """Whether it is time for one, by the clock of rank 0, whose alone counts."""
        since = time.monotonic() - self._saved_at
        return self._place.is_main and self._every_seconds is not None and since >= self._every_seconds

    def save(self, job: Job, *, wait: bool = False) -> None:
        """Write the job's state.

        :param wait: until it is on the disk, even if it may be written in the background
        :raises UsageError: on every rank, when it could not be written, or the one before could not
        """
        job.watchdog.at(job.step, "checkpoint")
        ranks: list[Any] = [None] * self._place.world_size
        dist.all_gather_object(ranks, state_of_rank(job))
        with job.watchdog.paused(), self._place.fail_together():  # a disk may be slower than any other rank
            if self._place.is_main:
                self._join()
                if job.user_error is not None:  # the metrics of this very step may not have been written
                    raise job.user_error
                manifest, state = manifest_of(job), state_of_job(job, ranks)
                if self._config.async_checkpoint and not wait:
                    self._copy = copied(state, self._copy)
                    self._thread = threading.Thread(target=self._write, args=(manifest, self._copy), name="saving")
                    self._thread.start()
                else:
                    self._write(manifest, state)
                    self._join()
        self._saved_at = time.monotonic()

    def finish(self) -> None:
        """Wait for what is being written, and for the metrics.

        :raises UsageError: on every rank, when it could not be
        """
        with self._place.fail_together():
            self._join()
            self._metrics.sync()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:  # the run has failed; what it had saved is worth a moment
            self._thread.join()

    def _write(self, manifest: Manifest, state: dict[str, Any]) -> None:
        try:
            self._metrics.sync()
            storage.write(self._config.run_dir, manifest, state)
            best = manifest.progress["best"]
            storage.prune(self._config.run_dir, self._config.keep_last, best["name"] if best else None)
        except Exception as error:  # what this thread raises, nobody would see
            self._failure = error

    def _join(self) -> None:
        """:raises UsageError: when the last checkpoint could not be written"""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def copied(tree: Any, earlier: Any = None) -> Any:
    """A copy of nested dicts, lists and tensors on the CPU.

    :param earlier: a copy that is no longer needed, whose memory is taken: new memory would cost a page fault per 4 KiB
    """
    if isinstance(tree, Tensor):
        if isinstance(earlier, Tensor) and (earlier.shape, earlier.dtype) == (tree.shape, tree.dtype):
            return earlier.copy_(tree.detach())
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {k: copied(v, earlier.get(k) if isinstance(earlier, dict) else None) for k, v in tree.items()}
    if isinstance(tree, list):
        same = isinstance(earlier, list) and len(earlier) == len(tree)
        return [copied(value, earlier[i] if same else None) for i, value in enumerate(tree)]
    return tree
