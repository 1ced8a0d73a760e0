"""The guard of a training step: a bad step does no harm, and all ranks take the same decision.

A training step calls a guard in three places: for its batches, with the loss of each micro-step, and with the norm of the
gradients. The default (ddp/job.py) does nothing. This one

- saves what a skipped step would leave behind, BatchNorm's statistics and the metrics, and restores it;
- sends flags with the gradients, so that all ranks stop, save or fail after the same step (ddp/resilience/flags.py);
- skips a step whose loss or gradients are not finite (ddp/resilience/nonfinite.py);
- tells the watchdog where this rank is.

It reads the flags and the norm in every step, which costs nothing on a CPU. For a GPU there is ddp/resilience/device_guard.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.data.datasets import Batch
from common.data.loaders import loader_errors
from common.distributed.process_group import DistEnv
from common.errors import UsageError
from common.machine import keep_freed_memory
from common.training.optimization import local
from common.training.precision import autocast
from ddp.job import Job, StepGuard
from ddp.resilience.flags import NO_FLAGS, NOT_FINITE, Flags, WithFlags


class ResilientGuard(StepGuard):
    """The guard of ``ddp.train``. DDP wraps :attr:`module`, then :meth:`begin` takes the job.

    :param network: of the job
    :param is_sharded: whether each rank has a part of it instead of a replica

    ``flags`` are those of the last step, the same on every rank: ``not_finite`` says that it was skipped. ``requests`` is
    called in each micro-step for the flags of this rank.
    """

    def __init__(self, network: nn.Module, env: DistEnv, is_sharded: bool = False) -> None:
        self._env, self._network = env, network
        self.flags = NO_FLAGS
        self.requests: Callable[[], Flags] = lambda: NO_FLAGS
        self._losses: list[Tensor] = []  # of this step's micro-steps
        self._with_flags = WithFlags(network, env.device)
        # Shards are reduced by the strategy, which knows the network's own parameters alone: the flags are summed apart.
        self.module: nn.Module = network if is_sharded else self._with_flags
        self._all_reduce: Callable[[Tensor], object] = env.sum_over_ranks if is_sharded else lambda _: None

    def begin(self, job: Job) -> None:
        """Guard the steps of this job, whose model wraps :attr:`module`. A collective."""
        # The job owns its guard. A cycle would keep its loader's workers until the garbage collector runs.
        self._job: Job = weakref.proxy(job)
        if self._env.device.type == "cpu":
            keep_freed_memory()
        self._buffers = SavedBuffers(job.network)
        self._one = torch.ones((), device=self._env.device)
        # torch's DDP and fully_shard look at requires_grad once. What is unfrozen later has each rank's own gradients, or none.
        looks_once = job.config.strategy == "fsdp2" or (job.config.strategy == "torch" and self._env.world_size > 1)
        self._trained = self._requires_grad() if looks_once else {}  # empty: nothing to compare with
        self._warm_up()

    def _requires_grad(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._job.named_module.named_parameters()}

    def _require_same_trained(self) -> None:
        """:raises UsageError: on every rank, if a parameter was frozen or unfrozen since the network was wrapped"""
        for name, trained in self._requires_grad().items() if self._trained else ():
            if trained != self._trained[name]:
                error = UsageError(
                    f"{name} was frozen or unfrozen during training, which --strategy torch and fsdp2 do not see: do it when the "
                    "model is built, or use --strategy naive"
                )
                error.seen_by_all = True
                raise error

    def wait_for_device(self) -> None:
        """Return when the host knows what became of all steps until now. A collective. On a CPU it always knows."""

    def _warm_up(self) -> None:
        """One backward pass that is thrown away, so that DDP's buckets are final before the first step.

        DDP rebuilds its buckets after the first backward pass, in the order in which gradients became ready. With three
        ranks or more, the order in which a gradient is summed over the ranks depends on its place in the bucket. A resumed
        run, whose first step is not the first, would otherwise differ in the last bit.
        """
        job, device = self._job, self._env.device
        self.save()
        frozen = self._frozen()
        with unchanged_attributes(self._network), autocast(device, job.config.precision):
            logits = job.model(job.data.to_input(job.empty_batch().images.to(device), job.config.memory_format))
        self._with_flags.attach(logits.float().sum(), NO_FLAGS).backward()
        self._with_flags.flags.grad = None
        job.optimizer.zero_grad(set_to_none=True)
        self.restore()
        with self._env.fail_together():
            if changed := [name for name, total in self._frozen().items() if total != frozen[name]]:
                raise UsageError(
                    f"forward writes to the frozen parameter {changed[0]}, which no skipped step restores and no rank shares: "
                    "register it as a buffer"
                )

    def _frozen(self) -> dict[str, str]:
        """A sum over each frozen parameter, by name; in words, where nan is nan."""
        named = self._job.named_module.named_parameters()
        return {
            name: str(one.detach().to(torch.complex128).abs().sum().item())
            for name, one in named
            if not one.requires_grad
        }

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
        self._buffers.save()
        self._job.window.mark()

    def restore(self) -> None:
        """Undo what a skipped step's forward passes have changed."""
        self._buffers.restore()
        self._job.window.rewind()

    def attach(self, loss: Tensor) -> Tensor:
        self._require_same_trained()
        self._losses.append(loss.detach())
        mine = self.requests()._replace(user_error=self._job.user_error is not None)
        return self._with_flags.attach(loss, mine)

    def accepts(self, norm: Tensor | None) -> bool:
        """See :class:`StepGuard`.

        :raises UsageError: on every rank, if one met a user error, or if too many steps had to be skipped
        """
        losses, self._losses = self._losses, []
        flags = Flags(*self._reduced_flags(norm).tolist())
        if flags.not_finite:
            self.restore()
        self._conclude(self._job.step + 1, flags, losses)
        return not flags.not_finite

    def _reduced_flags(self, norm: Tensor | None) -> Tensor:
        """The flags of this step, the same on every rank: bool ``[flags]``, on the device.

        :param norm: of the gradients. If it is not finite, neither is the step
        """
        scaler, gradient = self._job.scaler, self._with_flags.take_reduced()
        if norm is None:
            norm = sum_of_gradients(self._job.network.parameters())
            self._all_reduce(norm)
        self._all_reduce(gradient)
        flags = gradient != 0
        overflow = norm.isfinite().logical_not()
        # In fp16 a gradient overflows now and then. GradScaler skips that step by itself, and lowers the scale. It is worth
        # a report only when the scale cannot be lowered further. (scaler.scale() tells the scale without a wait.)
        if scaler.is_enabled():
            overflow &= scaler.scale(self._one) * scaler.get_backoff_factor() < 1.0
        flags[NOT_FINITE] |= overflow
        return flags

    def _conclude(self, step: int, flags: Flags, losses: list[Tensor]) -> None:
        """Act on a step's flags, as all ranks do.

        :param step: its number, from 1
        :param flags: those of any rank; ``not_finite`` says that the step was skipped
        :param losses: this rank's, one per micro-step
        :raises UsageError: as :meth:`accepts`
        """
        self.flags = flags
        if flags.user_error:
            with self._env.fail_together():
                if self._job.user_error is not None:
                    raise self._job.user_error
        if flags.not_finite:
            from ddp.resilience.nonfinite import report_skipped

            report_skipped(self._job, step, losses)


def sum_of_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """0-d; not finite if one element of a gradient is not. (The usual norm would overflow: 1e20 squared is inf.)

    On CUDA it is the sum of absolute values, by ``torch._foreach_norm``: a few kernels for all gradients. A CPU adds up the
    plain values in a fraction of the time. A DTensor counts by this rank's part.
    """
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    if gradients and gradients[0].is_cuda:
        return nn.utils.get_total_norm(gradients, norm_type=1.0)
    return torch.stack([gradient.sum() for gradient in gradients]).sum()


# What a forward pass writes beside its output: to buffers, and to the attributes of modules


class SavedBuffers:
    """A copy of a network's buffers. A forward pass may write to a buffer, or assign another tensor to its name.

    :meth:`restore` puts the tensor that was there back, with its values.
    """

    def __init__(self, network: nn.Module) -> None:
        self._places = [(module._buffers, name) for module in network.modules() for name in module._buffers]
        self._shapes: list[Any] = []
        # For each dtype: its buffers, memory for their values before the step, and for those after it.
        self._groups: list[Any] = []

    @torch.no_grad()
    def save(self) -> None:
        """Before the forward passes."""
        self._buffers = [place[name] for place, name in self._places]
        present = [buffer for buffer in self._buffers if buffer is not None]
        shapes = [(id(buffer), buffer.shape) for buffer in present]
        if shapes != self._shapes:
            self._shapes = shapes
            groups = [[buffer for buffer in present if buffer.dtype == dtype] for dtype in {b.dtype for b in present}]
            self._groups = [(group, _memory_for(group), _memory_for(group)) for group in groups]
        for group, (_, saved), _ in self._groups:
            torch._foreach_copy_(saved, group)

    @torch.no_grad()
    def restore(self, where: Tensor | None = None) -> None:
        """After the step.

        :param where: bool 0-d, on the device: whether to restore; always when None. The host need not know it, unless a forward
            pass assigned a buffer of another shape
        """
        for (place, name), buffer in zip(self._places, self._buffers, strict=True):
            now = place[name]
            if now is buffer:
                continue
            if where is not None and now is not None and buffer is not None and now.shape == buffer.shape:
                buffer.copy_(now)  # the choice comes below
            elif where is not None and not where:
                continue
            place[name] = buffer
        for group, (flat, saved), (flat_now, parts) in self._groups:
            if where is None:
                torch._foreach_copy_(group, saved)
            else:
                torch._foreach_copy_(parts, group)
                torch.where(where, flat, flat_now, out=flat_now)
                torch._foreach_copy_(group, parts)


def _memory_for(buffers: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """For the values of buffers of one dtype: in one piece, and its parts in their shapes.

    So a GPU's host makes four calls a step for each dtype, however many buffers there are. (ResNet-50 has 159.)
    """
    flat = buffers[0].new_empty(sum(buffer.numel() for buffer in buffers))
    parts = flat.split([buffer.numel() for buffer in buffers])
    return flat, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]


@contextlib.contextmanager
def unchanged_attributes(network: nn.Module) -> Iterator[None]:
    """A block after which the modules' own attributes are what they were before it: numbers, and the content of tensors,
    containers and objects.

    A forward pass may count in Python. (Parameters, buffers and submodules are not touched.)
    """
    torch_s_own = vars(nn.Module()).keys()
    before = [
        (vars(module), {name: value for name, value in vars(module).items() if name not in torch_s_own})
        for module in network.modules()
    ]
    shared = {id(one): one for one in (*network.modules(), *network.parameters(), *network.buffers())}
    contents = []
    for value in (value for _, own in before for value in own.values() if not callable(value)):
        with contextlib.suppress(Exception):  # what cannot be copied stays as it is
            contents.append((value, copy.deepcopy(value, shared)))
    try:
        yield
    finally:
        for attributes, own in before:
            for name in attributes.keys() - torch_s_own - own.keys():
                del attributes[name]
            attributes.update(own)
        for value, content in contents:
            if isinstance(value, Tensor):
                value.data.copy_(content.data)
            elif isinstance(value, list | deque | dict | set):
                value.clear()
                (value.extend if isinstance(value, list | deque) else value.update)(content)
            elif hasattr(value, "__dict__"):
                vars(value).update(vars(content))
