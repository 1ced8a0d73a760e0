"""The services beside the training loop of a job: metrics, checkpoints in time, stop requests, the watchdog, progress.

The loop in ddp/train.py calls it at the beginning, which restores a checkpoint, after each step, and after each epoch, which it
counts. It changes nothing else of what is computed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist

from common.command_line.stdout import print_results
from common.data.datasets import Batch
from common.data.loaders import loader_errors
from common.distributed.dist_env import implementation
from common.distributed.rank_logging import Progress
from common.files.run_directory import require_lock
from common.gpu.report import log_gpu
from common.signals import early_signals
from common.signals.stop_request import StopRequest, StopTogether, exit_status, signal_name
from common.training.evaluation import Evaluation, predict, samples_shown
from common.training.metrics import MetricsWriter
from common.training.precision import describe_arithmetic
from common.training.window import epoch_line, epoch_record
from ddp.checkpoint.checkpointer import Checkpointer, require_room
from ddp.checkpoint.state import restore
from ddp.checkpoint.storage import RunCheckpoint, name_of
from ddp.data import faster_loading
from ddp.job import Job
from ddp.resilience.device_guard import DeviceGuard
from ddp.resilience.guard import ResilientGuard
from ddp.resilience.profiling import profile_steps
from ddp.resilience.replica_check import require_equal_replicas
from ddp.sharded.equal_batches import equally_many

logger = logging.getLogger("ddp.train")


def build_guard(job: Job) -> ResilientGuard:
    """The guard for this rank's device; see :class:`ResilientGuard`. A collective."""
    if job.env.device.type == "cuda":
        return DeviceGuard(job)
    return ResilientGuard(job)


@contextlib.contextmanager
def supervise(job: Job, checkpoint: RunCheckpoint | None) -> Iterator[Supervisor]:
    """Watch over the training loop for the length of a block, which all ranks enter together.

    :param job: to be trained
    :param checkpoint: from which it continues, with that checkpoint's metrics
    """
    config, env = job.config, job.env
    supervisor = Supervisor(job)
    guard, stop = supervisor.guard, supervisor.guard.stop
    if checkpoint is not None:
        restore(job, *checkpoint)
        logger.info(f"resuming after step {job.step}, {job.step_in_epoch} steps into epoch {job.epoch + 1}")
    arithmetic = describe_arithmetic(env.device, config.precision, config.tf32)
    logger.info(
        f"{config.model} on {config.dataset}: {env.world_size} ranks x {config.grad_accumulation_steps} micro-steps x "
        f"{job.sampler.micro_batch_size} samples, {arithmetic}, {env.backend}, --workers {job.loader.num_workers}"
    )
    if env.device.type == "cuda":
        log_gpu(env.device, implementation(env.device))
    job.measure_mfu()
    with env.fail_together():
        if env.is_main and job.epoch < config.epochs:
            require_room(job)
        after = (job.step, job.epoch) if checkpoint is not None else None
        job.metrics = MetricsWriter(config.run_dir, after=after, tensorboard=config.tensorboard, silent=not env.is_main)
    with contextlib.ExitStack() as entered:
        entered.enter_context(job.metrics)
        # Left after the checkpointer. The others end soon after a rank has published its failure, and torchrun ends that
        # rank then: its last checkpoint has to be complete by that time.
        entered.enter_context(job.watchdog)
        supervisor.checkpointer = entered.enter_context(
            Checkpointer(config, env, job.metrics, lambda: require_lock(config.run_dir))
        )
        entered.enter_context(stop.listening())
        job.watchdog.stop_requested = stop.__bool__
        steps = config.epochs * job.sampler.steps_per_epoch
        job.progress = entered.enter_context(Progress(env, "train", steps, job.step))
        if config.profile:
            supervisor.profile_step = entered.enter_context(profile_steps(env, config.run_dir / "profile"))
        guard.checkpointer = supervisor.checkpointer
        yield supervisor


class Supervisor:
    """The calls of the training loop; see :func:`supervise`."""

    checkpointer: Checkpointer

    def __init__(self, job: Job) -> None:
        assert isinstance(job.guard, ResilientGuard)
        self.job, self.guard = job, job.guard
        self.profile_step: Callable[[], None] = lambda: None

    def after_step(self) -> None:
        """After a step: compare the replicas, leave, or save, whichever is due. The same on every rank."""
        job, config = self.job, self.job.config
        job.window.end_batch()
        self.profile_step()
        last = job.step_in_epoch == job.sampler.steps_per_epoch
        if config.check_replicas_every and job.step % config.check_replicas_every == 0:
            job.watchdog.at(job.step, "replica check")
            require_equal_replicas(job.network, job.step)
        save = self.guard.flags.save or self.checkpointer.due(job.step)
        if self.guard.flags.stop or save:
            self.guard.wait_for_device()  # on a GPU the flags were those of the step before: now they are those of this one
        if self.guard.flags.stop:
            self._leave()
        if save and not (last or self.guard.flags.not_finite):
            self.checkpointer.save(job)

    def until_stopped(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's batches of the test set, until a stop is requested; each is a sign of life for the watchdog."""
        self.job.watchdog.at(self.job.step, "evaluation")

        def loaded() -> Iterator[Batch]:
            with loader_errors():
                yield from itertools.takewhile(lambda _: not self.guard.stop, loader)

        batches = loaded()
        if self.job.config.is_sharded:
            batches = equally_many(batches, self.job.data, self.job.env)
        return self.job.watchdog.each(batches, "evaluation")

    def leave_if_stopped(self) -> None:
        """After an evaluation: all ranks leave if any was asked to stop."""
        if self.job.env.sum_over_ranks(torch.tensor(float(bool(self.guard.stop)), device=self.job.env.device)):
            self._leave()

    def end_epoch(self, result: Evaluation) -> None:
        """Count the epoch as done, log and record it. Its checkpoint, which is written next, may be the best."""
        job, totals = self.job, self.job.totals
        job.end_epoch(result.accuracy)
        if job.best is None or result.accuracy > job.best["accuracy"]:
            job.best = {"name": name_of(job.epoch, job.step), "accuracy": result.accuracy}
        assert job.metrics is not None
        with job.env.fail_together():  # the disk of rank 0 may be full
            job.metrics.write("epoch", job.step, epoch=job.epoch - 1, **epoch_record(totals, result))
        logger.info(epoch_line(job.epoch, job.config.epochs, totals, result, job.data.unit))

    def report(self, result: Evaluation) -> None:
        """Draw the figures and print the summary, on rank 0, while the others wait. This takes seconds, and then the run is
        complete: a stop request changes nothing any more. (A second one ends the process at once.)"""
        job = self.job
        config, env = job.config, job.env
        with StopRequest().listening() as stop:
            predicts = env.is_main or config.is_sharded  # of shards, a forward pass is a collective
            with env.fail_together():  # a rank that cannot read must not leave the others in a forward pass
                if predicts:
                    shown = samples_shown(job.data, env.device)
            if predicts:
                precision = config.precision if config.is_sharded else "fp32"
                predictions = predict(job.network, job.data, env, shown.images, precision)
            with env.fail_together():
                if env.is_main:
                    from common.reporting.report import finish  # and matplotlib with it

                    title = f"{config.model} on {config.dataset}, {env.world_size} ranks, {config.precision}"
                    remedies = faster_loading(config, job.data.train, job.loader)
                    print_results(
                        finish(config.run_dir, title, job.data, shown, predictions, result, job.epoch, remedies)
                    )
        if stop.number is not None:
            logger.warning(f"{signal_name(stop.number)} came after the last step: the run is complete")
        early_signals.leave_with(0)  # nor does a signal while the group is left and Python shuts down

    def _leave(self) -> NoReturn:
        """Save the step that is just over, and exit with a status that asks to be started again."""
        job = self.job
        self.checkpointer.save(job, wait=True)
        requests: list[int | None] = [None] * job.env.world_size
        dist.all_gather_object(requests, self.guard.stop.number)
        requested = ", ".join(f"{signal_name(n)} on rank {rank}" for rank, n in enumerate(requests) if n is not None)
        if job.env.is_main:
            logger.warning(
                f"stopped by {requested} after step {job.step}, which is saved: --resume continues from there"
            )
        raise StopTogether(exit_status(requests))
