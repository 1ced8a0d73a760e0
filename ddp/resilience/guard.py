"""The guard of a training step: a bad step does no harm, and all ranks take the same decision.

The trainer calls a guard in three places: ``batches`` once per epoch, ``report`` and ``may_step`` once per step. The default
(ddp/job.py) does nothing. This one

- remembers, before each step, what forward changes (BatchNorm's statistics, the metrics), and restores it if the step is skipped;
- reports four facts of this rank: asked to stop, checkpoint due, user error, loss not finite. The step sums the reports of
  all ranks, so all stop, save, fail or skip after the same step;
- skips a step whose loss or gradients are not finite. One such step would make every weight nan, on every rank, for good;
- tells the watchdog where this rank is.

It reads the sum and the norm in every step. On a GPU, Python (the host) would wait each time until the GPU (the device) has computed
them. So GPUs have a subclass of this guard, in ddp/resilience/device_guard.py, and what is on the device here serves it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data.datasets import Batch
from common.data.loaders import as_user_error
from common.errors import UsageError
from common.machine import keep_freed_memory
from common.signals.stop_request import StopRequest
from common.training.optimization import local
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.job import Job, StepGuard
from ddp.resilience.warm_up import warm_up
from ddp.watchdog.failure_detector import Position

logger = logging.getLogger("ddp.train")

T = TypeVar("T")


class Flags(NamedTuple):
    """The flags of one rank; or of all ranks, where a flag is set if any rank has set it.

    :param stop: leave after this step
    :param save: write a checkpoint after this step
    :param user_error: all ranks must end with this rank's message
    :param not_finite: the loss is inf or nan
    """

    stop: bool = False
    save: bool = False
    user_error: bool = False
    not_finite: bool = False


NO_FLAGS = Flags()
NOT_FINITE = Flags._fields.index("not_finite")


class ResilientGuard(StepGuard):
    """The guard of ``ddp.train``. It is made before the first step, by all ranks together.

    ``flags`` are those of the last step, the same on every rank: ``not_finite`` says that it was skipped. The supervisor sets
    ``checkpointer``, and lets ``stop`` listen to signals.
    """

    def __init__(self, job: Job) -> None:
        # Weak, since the job owns its guard: in a cycle, the workers of the job's loader would live until the garbage collector runs.
        self._job: Job = weakref.proxy(job)
        # named_module's parameters have the names that a message should say; those of a sharded job.network have a prefix.
        self._env, self._named_module, self._is_sharded = job.env, job.named_module, job.config.is_sharded
        self.flags = NO_FLAGS
        self.stop = StopRequest()  # stays unset until supervise() listens for signals
        self.checkpointer: Checkpointer | None = None
        self._losses: list[Tensor] = []  # of this step's micro-steps
        # scaler.scale(self._one) is the loss scale, on the device. (scaler.get_scale() would make the host wait.)
        self._one = torch.ones((), device=job.env.device)
        if job.env.device.type == "cpu":
            keep_freed_memory()  # malloc reuses it in the next step: to get it from the system again takes longer
        self._buffers = SavedBuffers(job.network)
        # torch's DDP and fully_shard read requires_grad once, when they wrap, so a later change must be refused. (But DDP on one rank
        # has nothing to average.)
        fixed_at_wrap = job.config.strategy == "fsdp2" or (job.config.strategy == "torch" and job.env.world_size > 1)
        self._required_at_wrap = self._requires_grad() if fixed_at_wrap else {}
        # One backward pass before the first step, whose effects are thrown away: see warm_up.py.
        self.remember()
        warm_up(job)
        self.undo()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch. The time until each comes counts as waiting for data.

        One rank may find a damaged file when the others already wait for its gradients. It then continues with black
        images to the end of the step, where all ranks stop together.
        """
        job = self._job
        job.window.begin()
        source = self._attempt(lambda: iter(loader))
        # One round for each micro-batch, until the epoch is over. micro_step counts within a step.
        for micro_step in itertools.cycle(range(job.config.grad_accumulation_steps)):
            if micro_step == 0:
                self.remember()
            # The watchdog compares these numbers over the ranks to tell who is behind: micro-step k waits for its data at 2k, and
            # trains at 2k + 1.
            job.watchdog.position = Position(job.step + 1, 2 * micro_step, "data")
            # source is None if the loader could not begin. batch is None after an error, or at the end of the epoch.
            batch = None if source is None else self._attempt(lambda: job.window.next_of(source))
            if job.user_error is not None:  # now or earlier in this step: go on with black images
                batch = job.empty_batch()
            elif batch is None:  # no error: the epoch is over
                return
            job.watchdog.position = Position(job.step + 1, 2 * micro_step + 1, "training")
            yield batch
            job.window.end_batch()

    def _attempt(self, load: Callable[[], T]) -> T | None:
        """The result. None after an error that is the user's to fix, such as a damaged file, which becomes the job's ``user_error``."""
        try:
            return load()
        except (UsageError, RuntimeError, OSError, EOFError) as error:
            self._job.user_error = as_user_error(error)  # raises it again if it is no user's error
            return None

    def remember(self) -> None:
        """Remember the state to which a skipped step returns."""
        self._buffers.save()
        self._job.window.mark()

    def undo(self) -> None:
        """Undo what a skipped step's forward passes have changed."""
        self._buffers.restore()
        self._job.window.rewind()

    def report(self, losses: list[Tensor]) -> Tensor:
        """This rank's flags of a step, float32 ``[len(Flags._fields)]`` on the device: 1 where a flag is set, else 0.

        :param losses: 0-d, of the micro-steps
        :raises UsageError: if a parameter was frozen or unfrozen since the network was wrapped, on each rank where it was
        """
        self._require_same_requires_grad()
        self._losses = losses
        checkpoint_is_due = self.checkpointer is not None and time.monotonic() >= self.checkpointer.due_at
        known = Flags(
            stop=self.stop.number is not None,  # the signal's number
            save=checkpoint_is_due,
            user_error=self._job.user_error is not None,
        )
        report = torch.zeros(len(known), device=self._env.device)
        for index, flag in enumerate(known):  # (torch.tensor(known) on a GPU would be a copy that the host waits for)
            if flag:
                report[index] = 1
        report[NOT_FINITE] = ~torch.stack(losses).sum().isfinite()  # on the device: the host does not wait
        return report

    def _requires_grad(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._named_module.named_parameters()}

    def _require_same_requires_grad(self) -> None:
        if not self._required_at_wrap:
            return
        for name, required in self._requires_grad().items():
            if required != self._required_at_wrap[name]:
                error = UsageError(
                    f"{name} was frozen or unfrozen during training, which --strategy torch and fsdp2 do not see: do it when the "
                    "model is built, or use --strategy naive"
                )
                error.seen_by_all = True  # each rank sees it by itself, so none has to tell the others
                raise error

    def may_step(self, norm: Tensor | None, reports: Tensor) -> bool:
        """Undo a bad step, raise user errors, and say whether to call the optimizer.

        :raises UsageError: on every rank, if one met a user error, or if too many steps had to be skipped
        """
        flags_on_device = self._flags_of_all_ranks(norm, reports)
        flags = Flags(*flags_on_device.tolist())  # the host waits for the device
        if flags.not_finite:
            self.undo()
        self._conclude(self._job.step + 1, flags, self._losses)
        return not flags.not_finite

    def _flags_of_all_ranks(self, norm: Tensor | None, reports: Tensor) -> Tensor:
        """The flags of this step, the same on every rank: a bool for each field of :class:`Flags`, on the device.

        :param norm: of the gradients. If it is not finite, neither is the step
        :param reports: the sum over the ranks
        """
        job, flags = self._job, reports != 0
        if norm is None:
            norm = sum_of_gradients(job.network.parameters())  # finite if they are
            if self._is_sharded:
                self._env.sum_over_ranks(norm)
        overflow = ~norm.isfinite()
        # In fp16 an overflow is normal: GradScaler skips the step by itself, and lowers the loss scale. The step counts as bad only if
        # that makes the scale smaller than 1. Then the gradients would overflow without any scale.
        if job.scaler.is_enabled():
            next_scale = job.scaler.scale(self._one) * job.scaler.get_backoff_factor()
            overflow &= next_scale < 1.0
        flags[NOT_FINITE] |= overflow
        return flags

    def _conclude(self, step: int, flags: Flags, losses: list[Tensor]) -> None:
        """Act on a step's flags, as all ranks do.

        :param step: its number, from 1
        :param flags: of all ranks together; ``not_finite`` says that the step was skipped
        :param losses: this rank's, one per micro-step
        :raises UsageError: as :meth:`may_step`
        """
        self.flags = flags
        if flags.user_error:
            with self._env.fail_together():  # if one rank raises in this block, all others raise at its end
                if self._job.user_error is not None:
                    raise self._job.user_error
        if flags.not_finite:
            report_skipped(self._job, step, losses)

    def wait_for_device(self) -> None:
        """Return when ``flags`` are those of the latest step. Here they always are; DeviceGuard reads them one step later."""


def report_skipped(job: Job, step: int, losses: list[Tensor]) -> None:
    """Log a step as skipped. The numbers of its samples go to ``metrics.jsonl``, so that one can look at them. A collective.

    :param step: its number, from 1, over all epochs; it lies in the present epoch
    :param losses: this rank's, one per micro-step
    :raises UsageError: on every rank, when more than ``--max-skipped-steps`` were skipped
    """
    everyone: list[list[float]] = [[]] * job.env.world_size
    dist.all_gather_object(everyone, [loss.item() for loss in losses])
    bad_losses = {rank: [x for x in theirs if not math.isfinite(x)] for rank, theirs in enumerate(everyone)}
    what = [f"the loss was {bad[0]} on rank {rank}" for rank, bad in bad_losses.items() if bad]
    cause = f"{', '.join(what) or 'a gradient was not finite'} at step {step}"
    job.skipped_steps += 1
    step_in_epoch = step - 1 - job.epoch * job.sampler.steps_per_epoch
    job.record("skipped", step, losses=everyone, samples=job.sampler.global_batch(step_in_epoch).tolist())
    most = job.config.max_skipped_steps
    if job.skipped_steps > most:
        error = UsageError(
            f"{cause}: {job.skipped_steps} steps had to be skipped, more than --max-skipped-steps {most}: try a lower "
            "--lr or --clip-norm, and look at that step's samples, which are in metrics.jsonl; none of these steps has "
            "changed the weights, and --resume continues from the last checkpoint"
        )
        error.seen_by_all = True
        raise error
    if job.env.is_main:
        logger.warning(
            f"{cause}: that step is skipped ({job.skipped_steps} until now); its samples are in metrics.jsonl"
        )


def sum_of_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """A cheap sum, 0-d: inf or nan if any element of a gradient is. (The usual norm would overflow: in float32, 1e20 squared is inf.)

    On CUDA it is the sum of absolute values, by ``torch._foreach_norm``: a few kernels for all gradients. A CPU adds up the
    plain values in a fraction of the time. A DTensor counts by this rank's part.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and gradients[0].is_cuda:
        return nn.utils.get_total_norm(gradients, norm_type=1.0)
    return torch.stack([gradient.sum() for gradient in gradients]).sum()


class BuffersOfDtype(NamedTuple):
    """The buffers of one dtype, and memory for two copies of their values.

    ``before`` takes the values of before the forward passes. ``after`` is scratch memory for :meth:`SavedBuffers.restore` on a GPU.
    Each copy is one piece of memory (``before_flat``), with a view for each buffer in its shape (``before``). So save takes one
    GPU call and restore three, however many buffers there are. (ResNet-50 has 159.)
    """

    buffers: list[Tensor]
    before_flat: Tensor
    before: list[Tensor]
    after_flat: Tensor
    after: list[Tensor]


class SavedBuffers:
    """A copy of a network's buffers. A forward pass may write to a buffer, or assign another tensor to its name.

    :meth:`restore` puts the tensor that was there back, with its values.
    """

    def __init__(self, network: nn.Module) -> None:
        self._places = [(module._buffers, name) for module in network.modules() for name in module._buffers]
        self._layout: list[Any] = []
        self._groups: list[BuffersOfDtype] = []

    @torch.no_grad()
    def save(self) -> None:
        """Before the forward passes."""
        self._buffers = [place[name] for place, name in self._places]
        present = [buffer for buffer in self._buffers if buffer is not None]
        layout = [(id(buffer), buffer.shape) for buffer in present]
        if layout != self._layout:  # another tensor, or another shape, since the last step
            self._layout = layout
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for buffer in present:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
            self._groups = [  # _memory_for gives the flat memory and its views: once for before, once for after
                BuffersOfDtype(buffers, *_memory_for(buffers), *_memory_for(buffers)) for buffers in by_dtype.values()
            ]
        for group in self._groups:
            torch._foreach_copy_(group.before, group.buffers)

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """After the step: put the values of before the forward passes back.

        :param where: None to put them back. DeviceGuard gives a bool, 0-d on the device, that is True if they must be put back: the
            device picks the values, and the host does not read the bool (unless a forward pass assigned a buffer of another shape)
        """
        for (place, name), buffer in zip(self._places, self._buffers, strict=True):
            now = place[name]
            if now is buffer:
                continue
            if where is None:
                place[name] = buffer
            elif now is not None and buffer is not None and now.shape == buffer.shape:
                # With the present values at first. Below, torch.where puts the old ones back, or leaves these.
                place[name] = buffer.copy_(now)
            elif where:  # another shape: the host waits for ``where``
                place[name] = buffer
        for group in self._groups:
            if where is None:
                torch._foreach_copy_(group.buffers, group.before)
            else:
                torch._foreach_copy_(group.after, group.buffers)
                # buffers = where(where, before, buffers), in three calls
                torch.where(where, group.before_flat, group.after_flat, out=group.after_flat)
                torch._foreach_copy_(group.buffers, group.after)


def _memory_for(buffers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    flat = buffers[0].new_empty(sum(buffer.numel() for buffer in buffers))
    parts = flat.split([buffer.numel() for buffer in buffers])
    return flat, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
