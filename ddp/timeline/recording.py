"""The moments of a training step on a rank: each gradient ready, each all-reduce started, each all-reduce ended.

Moments are seconds of ``time.perf_counter``, which on Linux is CLOCK_MONOTONIC: all processes of a machine share it, so the
ranks' moments need no alignment. On a GPU they would say when work was queued and not when it was done: this module is for
the CPU, and ``ddp.train --profile`` is for GPUs.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from common.data.datasets import Batch, ImageData
from common.distributed.process_group import DistEnv
from common.training.models import build_model
from common.training.optimization import build_optimizer, set_learning_rate
from common.training.randomness import derive_seed
from common.training.recipes import require_a_batch
from ddp.all_reduce.base import AllReduce, Pending
from ddp.all_reduce.choice import build_all_reduce
from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel
from ddp.config import TrainConfig
from ddp.sampler import MicroBatchSampler


@dataclass
class Sending:
    """The start and the end of one bucket's all-reduce on one rank."""

    started: float
    ended: float = 0.0


@dataclass
class Step:
    """A step's moments on one rank, in their order.

    :param began: the step begins
    :param loaded: the batch is loaded
    :param forwarded: the loss is computed, and backward begins
    :param ready: for each parameter, its gradient is computed
    :param handled: for each parameter, DDP's hook returns, which may copy the gradient and start an all-reduce
    :param sent: the all-reduce of each bucket, in the order of their starts
    :param returned: backward returns, and all gradients are averages
    :param ended: the optimizer step is over
    """

    began: float
    loaded: float = 0.0
    forwarded: float = 0.0
    ready: list[float] = field(default_factory=list)
    handled: list[float] = field(default_factory=list)
    sent: list[Sending] = field(default_factory=list)
    returned: float = 0.0
    ended: float = 0.0

    @property
    def computed(self) -> float:
        """The last gradient is ready. The rest of backward waits for all-reduces."""
        return max(self.ready)

    def since(self, origin: float) -> Step:
        """The same moments, counted from ``origin``."""
        return Step(
            self.began - origin,
            self.loaded - origin,
            self.forwarded - origin,
            [moment - origin for moment in self.ready],
            [moment - origin for moment in self.handled],
            [Sending(sending.started - origin, sending.ended - origin) for sending in self.sent],
            self.returned - origin,
            self.ended - origin,
        )


class Recording(AllReduce):
    """Wraps an all-reduce that runs in the background thread, and records its moments.

    ``sent`` has one entry for each :meth:`start`, and can be replaced between steps.
    """

    def __init__(self, all_reduce: AllReduce) -> None:
        super().__init__()
        self.sent: list[Sending] = []
        self._all_reduce = all_reduce

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._all_reduce.allocate(numel, dtype, device)

    def start(self, buffer: Tensor) -> Pending:
        self.sent.append(Sending(time.perf_counter()))
        return super().start(buffer)

    def run(self, buffer: Tensor) -> None:
        self._all_reduce.run(buffer)
        oldest = next(sending for sending in self.sent if not sending.ended)  # one thread runs them in order
        oldest.ended = time.perf_counter()

    def close(self) -> None:
        super().close()
        self._all_reduce.close()


class RecordingBackend(Recording):
    """The same for the backend's own all-reduce, whose threads may run several at a time."""

    def start(self, buffer: Tensor) -> Pending:
        sending = Sending(time.perf_counter())
        self.sent.append(sending)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        # The backend's own thread records the end. A waiting thread would first have to get a core.
        return work.get_future().then(functools.partial(_record_end, sending))


def _record_end(sending: Sending, future: torch.futures.Future[Any]) -> None:
    sending.ended = time.perf_counter()
    future.wait()  # raises the error of a failed all-reduce


class Recorder:
    """The service of one rank: it trains with the hand-written DDP and records the moments of each step.

    :param config: for the CPU, without gradient accumulation
    :param all_reduce: of :data:`ddp.all_reduce.ALL_REDUCES`
    :param bucket_cap_mb: as in the hand-written DDP
    """

    def __init__(
        self, env: DistEnv, config: TrainConfig, data: ImageData, all_reduce: str, bucket_cap_mb: float | None
    ) -> None:
        self._config, self._data = config, data
        require_a_batch(config, self._data)
        torch.manual_seed(derive_seed(config.seed, "weights"))
        network = build_model(config.model, self._data.shape, len(self._data.classes), config.dropout)
        network = network.to(memory_format=config.memory_format)
        self._parameters = dict(network.named_parameters())
        self._ready = dict.fromkeys(self._parameters, 0.0)
        self._handled = dict(self._ready)
        build = RecordingBackend if all_reduce == "backend" else Recording
        self._all_reduce = build(build_all_reduce(all_reduce))
        self._model = HandwrittenDistributedDataParallel(
            network, broadcast_buffers=False, bucket_cap_mb=bucket_cap_mb, all_reduce=self._all_reduce
        )
        self._record_into(self._ready, self._handled)
        self._optimizer = build_optimizer(
            config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
        )
        self._sampler = MicroBatchSampler(self._data.train, config.batch_size, 1, env.world_size, env.rank, config.seed)
        self._batches = self._endless_batches()
        self._steps = 0

    def parameters(self) -> list[str]:
        """The parameters' names, in the order of :attr:`Step.ready`."""
        return list(self._parameters)

    def buckets(self) -> list[dict[str, int]]:
        """The buckets in the order of their all-reduces. Each maps its parameters to the bytes of the gradients.

        The buckets are final after the first step.
        """
        names = {parameter: name for name, parameter in self._parameters.items()}
        return [{names[p]: p.nbytes for p in bucket.parameters.values()} for bucket in self._model.reducer.buckets]

    def run(self, steps: int) -> list[Step]:
        """Take some steps. All ranks start together."""
        dist.barrier()
        return [self._step() for _ in range(steps)]

    def compute(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` backward passes without synchronization. All ranks start together."""
        dist.barrier()
        seconds = []
        for _ in range(steps):
            with self._model.no_sync():
                loss = self._forward(next(self._batches))
                began = time.perf_counter()
                loss.backward()
                seconds.append(time.perf_counter() - began)
            self._optimizer.zero_grad(set_to_none=True)
        return seconds

    def _step(self) -> Step:
        step = Step(time.perf_counter())
        self._all_reduce.sent = step.sent
        batch = next(self._batches)
        step.loaded = time.perf_counter()
        loss = self._forward(batch)
        step.forwarded = time.perf_counter()
        loss.backward()
        step.returned = time.perf_counter()
        set_learning_rate(self._optimizer, self._config.rate_at(self._steps, self._sampler.steps_per_epoch))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        step.ended = time.perf_counter()
        step.ready, step.handled = list(self._ready.values()), list(self._handled.values())
        self._steps += 1
        return step

    def _forward(self, batch: Batch) -> Tensor:
        inputs = self._data.to_input(batch.images, self._config.memory_format)
        return F.cross_entropy(self._model(inputs), batch.labels)

    def _record_into(self, ready: dict[str, float], handled: dict[str, float]) -> None:
        """Register hooks on each parameter that record when its gradient is ready, and when DDP has handled it."""

        def record(moments: dict[str, float], name: str, *_: object) -> None:
            moments[name] = time.perf_counter()

        for name, parameter in self._parameters.items():
            # DDP's hook is on the node that accumulates the gradient. The node calls its hooks after those of the parameter.
            parameter.register_post_accumulate_grad_hook(functools.partial(record, ready, name))
            get_gradient_edge(parameter).node.register_hook(functools.partial(record, handled, name))

    def _endless_batches(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            self._sampler.set_epoch(epoch)
            for key in self._sampler:
                yield self._data.train.__getitems__(key)
