"""What surrounds one training step, so that a bad one does no harm and all ranks take the same decision.

The training loop calls a guard in three places: for the batches of an epoch, with the loss of each micro-step, and with the
norm of the gradients. The default (ddp/job.py) does nothing. This one

- saves what a skipped step would leave behind, BatchNorm's statistics and the metrics, and restores it;
- sends flags with the gradients, so that all ranks stop, save or fail after the same step;
- skips a step whose loss or gradients are not finite (ddp/resilience/nonfinite.py);
- tells the watchdog where this rank is.

A signal reaches one rank. A loss is nan on one. One rank's clock says that it is time to save. If that rank alone left the
loop, the others would wait for it forever. An all-reduce of the flags in every step would cost a round trip (0.3 to 1.4 ms
over gloo). But every step all-reduces the gradients anyway. So the flags are the gradient of one more parameter, which no
optimizer knows: they are attached to the loss, and DDP, torch's or any other, all-reduces them with the rest. (A sharded
strategy reduces the network's gradients only: there they take an all-reduce of their own.)
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.data.datasets import Batch
from common.distributed.process_group import DistEnv
from common.errors import UsageError
from common.resilience.loader_errors import loader_errors
from common.training.optimization import local
from common.training.precision import autocast
from ddp.batchnorm import SavedStatistics
from ddp.job import Job, StepGuard


class Flags(NamedTuple):
    """What one rank reports, or what any rank has reported.

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


class WithFlags(nn.Module):
    """A network and the parameter whose gradient carries the flags. This is what DDP wraps; the network itself, its
    ``state_dict`` and its optimizer do not know the parameter."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.flags = nn.Parameter(torch.zeros(len(Flags._fields), device=device))
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        """The network's own."""
        return self.network(*inputs)

    def attach(self, loss: Tensor, flags: Flags) -> Tensor:
        """The same loss, whose backward pass leaves this rank's flags in the parameter's gradient.

        A loss that is not finite makes all gradients nan, and so is seen on every rank: GradScaler looks at nothing else,
        and cross-entropy's gradients can be finite where the loss is inf.

        :param loss: 0-d; whether it is finite is found on its device, without the host waiting for it
        :param flags: this rank's; ``not_finite`` is filled in
        """
        zero_or_nan = 0 * loss.detach()
        values = torch.zeros_like(self.flags)
        values[Flags._fields.index("not_finite")] = zero_or_nan
        for number, flag in enumerate(flags):
            if flag:
                values[number] = 1
        # The parameter is 0: the product adds nothing to the loss, and has ``values`` for its gradient.
        return loss * (1 + zero_or_nan) + torch.dot(self.flags, values)

    def no_sync(self) -> Any:
        """That of the network, if it is sharded: then this module is the outermost."""
        return self.network.no_sync()  # type: ignore[operator]

    def reduced(self, all_reduce: Callable[[Tensor], object] = lambda _: None) -> Flags:
        """After backward: what any rank attached in any micro-step. The same on every rank.

        :param all_reduce: sums over the ranks, in place, where no DDP has done it
        """
        assert self.flags.grad is not None, "no flags were attached to the loss"
        all_reduce(self.flags.grad)
        values = self.flags.grad.tolist()  # averaged over the ranks and scaled; or nan, which differs from 0 too
        self.flags.grad = None
        return Flags(*(value != 0 for value in values))


class ResilientGuard(StepGuard):
    """The guard of ``ddp.train``; first :meth:`wrap` the network, then :meth:`begin` the job.

    ``flags`` are those of the last step, the same on every rank: ``not_finite`` says that it was skipped. ``requests`` is
    called in each micro-step for the flags of this rank.
    """

    def __init__(self, env: DistEnv) -> None:
        self._env = env
        self.flags = NO_FLAGS
        self.requests: Callable[[], Flags] = lambda: NO_FLAGS
        self._losses: list[Tensor] = []  # of this step's micro-steps
        # A sharded strategy reduces the gradients of the network alone, and each rank has other parts of them.
        self._all_reduce: Callable[[Tensor], object] = lambda _: None

    def wrap(self, network: nn.Module) -> WithFlags:
        self._with_flags = WithFlags(network, self._env.device)
        self._statistics = SavedStatistics(network)
        return self._with_flags

    def begin(self, job: Job) -> None:
        """Guard the steps of this job, whose network this guard has wrapped. A collective."""
        # The job owns its guard. A cycle would keep its loader's workers until the garbage collector runs.
        self._job: Job = weakref.proxy(job)
        if job.config.is_sharded:
            self._all_reduce = self._env.sum_over_ranks
        self._warm_up()

    def _warm_up(self) -> None:
        """One backward pass that is thrown away, so that DDP's buckets are final before the first step.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients became ready. With three
        ranks or more, the order in which a gradient is summed over the ranks depends on its place in the bucket. A resumed
        run, whose first step is not the first, would otherwise differ in the last bit.
        """
        job, device = self._job, self._env.device
        self.save()
        with autocast(device, job.config.precision):
            logits = job.model(job.data.to_input(job.empty_batch().images.to(device), job.config.memory_format))
        self._with_flags.attach(logits.float().sum(), NO_FLAGS).backward()
        self._with_flags.flags.grad = None
        job.optimizer.zero_grad(set_to_none=True)
        self.restore()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """This rank's micro-batches of an epoch.

        One rank may find a damaged file when the others already wait for its gradients. It then continues with empty
        images to the end of the step, where all ranks stop together.
        """
        job = self._job
        source = self._loaded(loader)
        for micro_step in itertools.cycle(range(job.config.grad_accumulation_steps)):
            if micro_step == 0:
                self.save()
            job.watchdog.at(job.step + 1, "data")
            batch = next(source, None)
            if batch is None:
                return
            job.watchdog.at(job.step + 1, "training")
            yield batch

    def _loaded(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        try:
            with loader_errors():  # a loader worker that was killed, a full /dev/shm
                yield from loader
        except UsageError as error:
            self._job.user_error = error
            while True:
                yield self._job.empty_batch()

    def save(self) -> None:
        """Remember the state to which a skipped step returns."""
        self._statistics.save()
        self._job.window.mark()

    def restore(self) -> None:
        """Undo what a skipped step's forward passes have changed."""
        self._statistics.restore()
        self._job.window.rewind()

    def attach(self, loss: Tensor) -> Tensor:
        self._losses.append(loss.detach())
        mine = self.requests()._replace(user_error=self._job.user_error is not None)
        return self._with_flags.attach(loss, mine)

    def accepts(self, norm: Tensor | None) -> bool:
        """See :class:`StepGuard`.

        :raises UsageError: on every rank, if one met a user error, or if too many steps had to be skipped
        """
        job, scaler = self._job, self._job.scaler
        losses, self._losses = self._losses, []
        flags = self._with_flags.reduced(self._all_reduce)
        if flags.user_error:
            with self._env.fail_together():
                if job.user_error is not None:
                    raise job.user_error
        # In fp16 a gradient overflows now and then. GradScaler skips that step by itself, and lowers the scale. It is worth
        # a report only when the scale cannot be lowered further.
        scaler_skips = scaler.is_enabled() and scaler.get_scale() * scaler.get_backoff_factor() >= 1.0
        finite = not flags.not_finite and (scaler_skips or self._gradients_are_finite(norm))
        self.flags = flags._replace(not_finite=not finite)
        if not finite:
            from ddp.resilience.nonfinite import report_skipped

            self.restore()
            report_skipped(job, losses)
        return finite

    def _gradients_are_finite(self, norm: Tensor | None) -> bool:
        if norm is None:
            norm = sum_of_gradients(self._job.network.parameters())
            self._all_reduce(norm)
        return bool(norm.isfinite())


def sum_of_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """0-d; not finite if one element of a gradient is not. (A norm would overflow: it squares, and 1e20 squared is inf.)

    Of DTensors, this rank's part.
    """
    return torch.stack([local(p.grad).sum() for p in parameters if p.grad is not None]).sum()
