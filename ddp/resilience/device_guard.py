"""The guard for a GPU: the device decides, and the host reads the decision one step later.

A GPU computes what the host has queued. To read a number, the host must wait until all that was queued before it is done; it
queues nothing meanwhile, and the GPU then idles until the next kernels come. ddp/resilience/guard.py reads in every step.

So here nothing is read when a step ends. Whether it must be skipped is a number on the device, and all that follows from it
happens there: the fused optimizers of torch take it as ``found_inf`` and change nothing if it is 1, and ``torch.where`` chooses
between the statistics and metrics of before and after. The flags are copied to the host behind the step. The host reads
them one step later, when the device already works on the next one. It does so in the same place on all ranks, so all still
agree. They stop, save, fail and report a skipped step one step later than on a CPU. Where a checkpoint is written, or metrics are
read, the host waits anyway, and must know the flags of all steps: there it reads at once (:meth:`DeviceGuard.wait_for_device`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp.job import Job
from ddp.resilience.guard import NO_FLAGS, NOT_FINITE, Flags, ResilientGuard


class Unread(NamedTuple):
    """A step whose flags are on their way to the host: its number, from 1, and its losses, one per micro-step."""

    step: int
    losses: list[Tensor]


class DeviceGuard(ResilientGuard):
    """Guards steps without a wait. (It runs on CPUs too, and comes to the same bits as the other: so it is tested.)

    ``flags`` are those that were read in this step: of the step before or, after :meth:`wait_for_device`, of this one.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        on_cuda = job.env.device.type == "cuda"
        # Only torch's fused optimizers take found_inf. (With fsdp2, SGD is not fused: then the host reads in every step.)
        self._device_decides = all(group.get("fused") for group in job.optimizer.param_groups)
        self._unread: Unread | None = None
        on_host = torch.zeros(len(Flags._fields), dtype=torch.bool)
        self._flags_on_host = on_host.pin_memory() if on_cuda else on_host
        self._arrived = torch.cuda.Event(blocking=True) if on_cuda else None  # a wait leaves the core to the loader
        self._skip = torch.zeros((), device=job.env.device)
        if self._device_decides:
            job.optimizer.register_step_pre_hook(self._pass_to_optimizer)

    def may_step(self, norm: Tensor | None, reports: Tensor) -> bool:
        """True: the optimizer is called in a bad step too. The device has the decision, and changes nothing then.

        :raises UsageError: as the other guard's, for the step before
        """
        if not self._device_decides:
            return super().may_step(norm, reports)
        losses = self._losses
        self.flags = NO_FLAGS
        self.wait_for_device()
        job, flags = self._job, self._flags_of_all_ranks(norm, reports)
        not_finite = flags[NOT_FINITE]
        self._buffers.restore(where=not_finite)
        job.window.rewind(where=not_finite)
        self._skip = not_finite.float()
        self._flags_on_host.copy_(flags, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._unread = Unread(job.step + 1, losses)
        if self._metrics_are_read():
            self.wait_for_device()
        return True

    def _metrics_are_read(self) -> bool:
        """Whether the loop reads the metrics after the present step."""
        job = self._job
        last = job.step_in_epoch + 1 == job.sampler.steps_per_epoch
        return last or (job.step + 1) % job.config.log_every == 0

    def wait_for_device(self) -> None:
        """Read the flags of the last step, if they were not read yet. A collective.

        :raises UsageError: as :meth:`may_step`, for that step
        """
        unread, self._unread = self._unread, None
        if unread is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()  # the device has done that step, but need not have done the next
        self._conclude(unread.step, Flags(*self._flags_on_host.tolist()), unread.losses)

    def _pass_to_optimizer(self, optimizer: Any, *_: Any) -> None:
        """Before the optimizer's step. In fp16, GradScaler has just set what it found itself."""
        scaled = self._job.scaler.is_enabled()
        optimizer.found_inf = torch.maximum(optimizer.found_inf, self._skip) if scaled else self._skip
