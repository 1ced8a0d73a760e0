"""Train a network on every device at once, with nothing but torch.distributed between you and the mechanism.

    torchrun --nproc_per_node=2 -m ddp.train

One process per device runs this file from top to bottom. All hold the same weights; each takes its own part of every
batch, DistributedDataParallel averages the gradients while the backward pass is still running, and so all take the same
step. Read it beside ddp/README.md.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import record_function

from common.cli import command, parse
from common.data.datasets import Batch
from common.distributed.process_group import DistEnv, process_group
from common.distributed.rank_logging import Progress, add_log_file, rank_logging
from common.errors import UsageError
from common.reporting.profiling import profile_steps
from common.reporting.report import WindowTotals, finish
from common.reporting.run_directory import LOG_FOLDER
from common.resilience.stop_request import StopRequest, exit_status, signal_name, to_be_requeued
from common.training.evaluation import Evaluation, evaluate
from common.training.metrics import MetricsWriter, check_tensorboard
from common.training.models import LEAST_SAMPLES
from common.training.precision import clip_gradients
from common.training.randomness import seed_torch
from dataloading.loader.failures import explained
from ddp.batchnorm import average_running_statistics
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.checkpoint.state import restore
from ddp.config import TrainConfig, micro_batch_size
from ddp.data import load_data
from ddp.job import Job, build_job, empty_batch
from ddp.resilience.flags import NO_FLAGS, Flags, raise_flags
from ddp.resilience.nonfinite import invalidate_gradients, report_skipped, sum_of_gradients
from ddp.resilience.replica_check import require_equal_replicas
from ddp.resilience.resume import open_run
from ddp.resilience.run_report import faster_loading

logger = logging.getLogger("ddp.train")

# The watchdog knows who is missing; the backend, whose timeout is this much longer, would only know that somebody is.
AFTER_THE_WATCHDOG_S = 30.0


@command
def main() -> None:
    config = parse(TrainConfig, "ddp.train", __doc__)
    # From here on there are as many of us as torchrun started. The process group is how we find each other.
    with (
        to_be_requeued(),
        process_group(config.device, config.backend, config.timeout + AFTER_THE_WATCHDOG_S, config.threads) as env,
        rank_logging(env),
    ):
        train(config, env)


def train(config: TrainConfig, env: DistEnv) -> None:
    """The whole run: what every rank does, from an empty directory, or the newest checkpoint, to the figures."""
    with env.fail_together():  # what one rank finds wrong ends all
        samples = micro_batch_size(config.batch_size, env.world_size, config.grad_accumulation_steps)
        if samples < LEAST_SAMPLES.get(config.model, 1):
            raise UsageError(
                f"{config.model} cannot normalize a single sample per rank and micro-step: use a larger --batch-size"
            )
        if config.tensorboard:
            check_tensorboard()
    data = load_data(config, env)
    with open_run(config, env, data) as found:
        add_log_file(env, config.run_dir / LOG_FOLDER)
        job = build_job(config, env, data, found.path if found else None)
        if found:
            restore(job, *found)
            logger.info(f"resuming after step {job.step}, {job.position} steps into epoch {job.epoch + 1}")
        logger.info(
            f"{config.model} on {config.dataset}: {env.world_size} ranks x {config.grad_accumulation_steps} micro-steps x "
            f"{samples} samples, {config.precision}, {env.backend}"
        )
        result = train_epochs(job, continued=found is not None)
        with env.fail_together():  # nobody leaves while rank 0 still draws
            if env.is_main:
                title = f"{config.model} on {config.dataset}, {env.world_size} ranks, {config.precision}"
                summary = finish(config.run_dir, title, job.network, data, env, result, faster_loading(config))
                print(summary, flush=True)


def train_epochs(job: Job, continued: bool) -> Evaluation:
    """What is left of the run, with all that watches over it; returns the last evaluation."""
    config, env, result = job.config, job.env, None
    steps = config.epochs * job.sampler.steps_per_epoch
    with env.fail_together():
        after = (job.step, job.epoch) if continued else None
        job.metrics = MetricsWriter(config.run_dir, after=after, tensorboard=config.tensorboard, silent=not env.is_main)
    with (
        job.metrics,
        Checkpointer(config, env, job.metrics) as checkpointer,
        job.watchdog,
        StopRequest().listening() as stop,
        Progress(env, "train", steps, job.step) as progress,
        profile_steps(env, config.run_dir / "profile" if config.profile else None) as step_done,
    ):
        while job.epoch < config.epochs:
            totals = train_epoch(job, checkpointer, stop, progress, step_done)
            result = test(job, checkpointer, stop)
            tested = {"test_loss": result.loss, "test_accuracy": result.accuracy}
            with env.fail_together():  # the disk of rank 0 may be full
                job.metrics.write("epoch", job.step, epoch=job.epoch, **totals.as_record(), **tested)
            job.end_epoch(result.accuracy)
            checkpointer.save(job)
            logger.info(
                f"epoch {job.epoch} of {config.epochs}: train loss {totals.loss:.4f}, test loss {result.loss:.4f}, "
                f"test accuracy {100 * result.accuracy:.2f} %, {totals.images_per_s:,.0f} images/s"
            )
        checkpointer.finish()
        return result or test(job, checkpointer, stop)  # the latter when it was resumed after its last epoch


def train_epoch(
    job: Job,
    checkpointer: Checkpointer | None = None,
    stop: StopRequest | None = None,
    progress: Progress | None = None,
    step_done: Callable[[], None] = lambda: None,
) -> WindowTotals:
    """One pass over the training set, or what is left of it; every ``log_every`` steps the ranks add up what they saw."""
    steps = job.sampler.steps_per_epoch
    # Another order, and other augmentations; without it every epoch repeats the first.
    job.sampler.set_epoch(job.epoch, first_step=job.position)
    job.model.train()
    batches = batches_of(job)
    while job.position < steps:
        agreed = train_step(
            job, batches, Flags(stop=bool(stop), save=checkpointer is not None and checkpointer.overdue())
        )
        step_done()
        last = job.position == steps
        if job.step % job.config.log_every == 0 or last:
            log_window(job, progress)
        if job.config.check_replicas_every and job.step % job.config.check_replicas_every == 0:
            job.watchdog.at(job.step, "replica check")
            require_equal_replicas(job.network, job.env, job.step)
        if last:
            average_running_statistics(job.network)  # the ranks' own differ; see ddp/batchnorm.py
        if checkpointer is not None:
            if agreed.stop and stop is not None:
                leave(job, checkpointer, stop)
            if not (last or agreed.not_finite) and (agreed.save or checkpointer.due(job.step)):
                checkpointer.save(job)
    next(batches, None)  # workers stay for the next epoch only if this one is seen to its end
    return WindowTotals.merge(job.windows)


def batches_of(job: Job) -> Iterator[Batch]:
    """This rank's micro-batches of an epoch.

    A damaged file is found by one rank, when the others may already wait for its gradients. So it goes on with empty
    images, to the end of the step, where all stop together.
    """
    try:
        with explained():  # a loader worker that was killed, a full /dev/shm
            yield from job.loader
    except UsageError as error:
        job.user_error = error
        while True:
            yield empty_batch(job)


def train_step(job: Job, batches: Iterator[Batch], raised: Flags = NO_FLAGS) -> Flags:
    """One optimizer step on one global batch: this rank's micro-batches of it, forward and backward, then the update.

    :param raised: by this rank; what the loss and the loader have to say is added
    :returns: what any rank has raised; ``not_finite`` is a step that was skipped for that
    :raises UsageError: on every rank, if one has met a mistake, or too many steps had to be skipped
    """
    config, device, scaler = job.config, job.env.device, job.precision.scaler
    seen = []
    job.statistics.keep()
    for micro_step in range(config.grad_accumulation_steps):
        with phase(job, "data"), job.window.waiting():
            images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        seed_torch(device, config.seed, "dropout", job.step, micro_step, job.env.rank)

        # DDP decides in forward whether the backward pass that follows will synchronize, so no_sync must cover both. Only
        # the last micro-step's backward averages over the ranks, and what it averages is the sum of all.
        synchronize = micro_step == config.grad_accumulation_steps - 1
        with contextlib.nullcontext() if synchronize else job.no_sync():
            with phase(job, "forward"), job.precision.autocast():
                logits, flags = job.model(job.data.to_input(images, config.memory_format))
                loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
            with phase(job, "backward"):
                scaled = scaler.scale(loss / config.grad_accumulation_steps)
                raise_flags(scaled, flags, raised._replace(user_error=job.user_error is not None)).backward()
        seen.append((loss.detach(), logits.detach(), labels))

    with phase(job, "optimizer"):
        agreed = job.carrier.agreed()
        if agreed.user_error:
            with job.env.fail_together():
                if job.user_error is not None:
                    raise job.user_error
        if agreed.not_finite:
            invalidate_gradients(job.network.parameters())
        if config.clip_norm is not None:
            scaler.unscale_(job.optimizer)  # first: the norm of scaled gradients means nothing
            total = clip_gradients(job.network.parameters(), config.clip_norm)
        elif not scaler.is_enabled():  # which looks at them itself
            total = sum_of_gradients(job.network.parameters())
        for group in job.optimizer.param_groups:
            group["lr"] = config.rate_at(job.step, job.sampler.steps_per_epoch)
        # If a gradient is inf or nan, the step is skipped: on all ranks alike, since they hold the same gradients. With fp16,
        # the scaler does that. It happens now and then, and is worth a word only when no scale is small enough.
        if scaler.is_enabled():
            before = scaler.get_scale()
            scaler.step(job.optimizer)
            scaler.update()
            finite = not agreed.not_finite and not (scaler.get_scale() < min(before, 1.0))
        elif finite := not agreed.not_finite and math.isfinite(total):
            job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=True)
        job.step += 1
        if finite:
            for loss, logits, labels in seen:
                job.window.add(loss, logits, labels)
        else:
            job.statistics.put_back()
            report_skipped(job, [loss for loss, _, _ in seen])
    return agreed._replace(not_finite=not finite)


def phase(job: Job, name: str) -> record_function:
    """A part of the step, for the profiler and for the watchdog."""
    job.watchdog.at(job.step + 1, name)
    return record_function(name)


def log_window(job: Job, progress: Progress | None) -> None:
    """What the ranks saw since the last time, for the metrics and the console."""
    totals = job.window.reduce(job.env)
    job.windows.append(totals)
    rate = job.optimizer.param_groups[0]["lr"]
    job.record("step", learning_rate=rate, loss_scale=job.precision.scaler.get_scale(), **totals.as_record())
    if progress is not None:
        progress.reach(job.step, f"loss {totals.loss:.3f}, lr {rate:.2g}, {totals.images_per_s:,.0f} images/s")


def test(job: Job, checkpointer: Checkpointer, stop: StopRequest) -> Evaluation:
    """Evaluate the model, all test samples divided over the ranks. All leave when any rank has been asked to stop."""
    job.watchdog.at(job.step, "evaluation")
    share = job.watchdog.each(stop.before(batches_to_test(job)), "evaluation")
    result = evaluate(job.network, job.data, job.env, job.precision, share)
    stopped = job.env.sum_over_ranks(torch.tensor(float(bool(stop)), device=job.env.device))
    if stopped:
        leave(job, checkpointer, stop)
    return result


def batches_to_test(job: Job) -> Iterator[Batch]:
    """This rank's part of the test set."""
    with explained():
        yield from job.test_loader


def leave(job: Job, checkpointer: Checkpointer, stop: StopRequest) -> NoReturn:
    """Save the step that is just over, and leave with a status that asks to be started again. On all ranks."""
    checkpointer.save(job, wait=True)
    asked: list[int | None] = [None] * job.env.world_size
    dist.all_gather_object(asked, stop.number)
    who = ", ".join(f"{signal_name(number)} on rank {rank}" for rank, number in enumerate(asked) if number is not None)
    if job.env.is_main:
        logger.warning(f"stopped by {who} after step {job.step}, which is saved: --resume continues from there")
    raise SystemExit(exit_status(asked))


if __name__ == "__main__":
    main()
