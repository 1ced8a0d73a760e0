"""The moments of a training step on a rank: each gradient ready, each all-reduce started, each all-reduce ended.

Moments are seconds of ``time.perf_counter``, which all processes of a machine share, so the ranks' moments need no alignment.
On a GPU they are the moments of its streams (common/reporting/clock.py): while a block of steps is recorded, moments are CUDA
events, which are read when the block is over. So the host may run ahead of the GPU, as it does in training.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from common.data.datasets import Batch, ImageData
from common.distributed.process_group import DistEnv
from common.randomness import derive_seed
from common.reporting.clock import Clock, clock_of
from common.training.models import build_model, to_device
from common.training.optimization import build_optimizer, set_learning_rate
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
        return self.read(lambda moment: moment - origin)

    def read(self, seconds: Callable[[Any], float]) -> Step:
        """The same moments, each as ``seconds`` tells it."""
        return Step(
            seconds(self.began),
            seconds(self.loaded),
            seconds(self.forwarded),
            [seconds(moment) for moment in self.ready],
            [seconds(moment) for moment in self.handled],
            [Sending(seconds(sending.started), seconds(sending.ended)) for sending in self.sent],
            seconds(self.returned),
            seconds(self.ended),
        )


class Recording(AllReduce):
    """Wraps an all-reduce that runs in the background thread, and records its moments.

    ``sent`` has one entry for each :meth:`start`, and can be replaced between steps.
    """

    def __init__(self, all_reduce: AllReduce, clock: Clock) -> None:
        super().__init__()
        self.sent: list[Sending] = []
        self._all_reduce, self._clock = all_reduce, clock

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._all_reduce.allocate(numel, dtype, device)

    def start(self, buffer: Tensor) -> Pending:
        self.sent.append(Sending(self._clock.stamp()))
        return super().start(buffer)

    def run(self, buffer: Tensor) -> None:
        self._all_reduce.run(buffer)
        oldest = next(sending for sending in self.sent if not sending.ended)  # one thread runs them in order
        oldest.ended = self._clock.stamp()

    def close(self) -> None:
        super().close()
        self._all_reduce.close()


class RecordingBackend(Recording):
    """The same for gloo's own all-reduce, whose threads may run several at a time."""

    def start(self, buffer: Tensor) -> Pending:
        sending = Sending(self._clock.stamp())
        self.sent.append(sending)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        # The backend's own thread records the end. A waiting thread would first have to get a core.
        return work.get_future().then(functools.partial(self._record_end, sending))

    def _record_end(self, sending: Sending, future: torch.futures.Future[Any]) -> None:
        sending.ended = self._clock.stamp()
        future.wait()  # raises the error of a failed all-reduce


class RecordingNCCL(Recording):
    """The same for NCCL, which sums in a stream of its own."""

    def __init__(self, all_reduce: AllReduce, clock: Clock, device: torch.device) -> None:
        super().__init__(all_reduce, clock)
        self._waiting = torch.cuda.Stream(device)  # it does nothing but wait for the sums, so it can tell their ends

    def start(self, buffer: Tensor) -> Pending:
        sending = Sending(self._clock.stamp())
        self.sent.append(sending)
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        with torch.cuda.stream(self._waiting):
            work.wait()  # the stream waits, not the host
            sending.ended = self._clock.stamp()
        return work


class Recorder:
    """The service of one rank: it trains with the hand-written DDP and records the moments of each step.

    :param config: without gradient accumulation
    :param all_reduce: of :data:`ddp.all_reduce.ALL_REDUCES`; on a GPU, ``"backend"``
    :param bucket_cap_mb: as in the hand-written DDP
    """

    def __init__(
        self, env: DistEnv, config: TrainConfig, data: ImageData, all_reduce: str, bucket_cap_mb: float | None
    ) -> None:
        self._config, self._data, self._device = config, data, env.device
        self._clock = clock_of(env.device)
        require_a_batch(config, self._data)
        torch.manual_seed(derive_seed(config.seed, "weights"))
        network = build_model(config.model, self._data.shape, len(self._data.classes), config.dropout)
        network = to_device(network, env.device, config.memory_format)
        self._parameters = dict(network.named_parameters())
        self._ready = dict.fromkeys(self._parameters, 0.0)
        self._handled = dict(self._ready)
        summing = build_all_reduce(all_reduce)
        self._all_reduce: Recording
        if env.device.type == "cuda":
            self._all_reduce = RecordingNCCL(summing, self._clock, env.device)
        else:
            self._all_reduce = (RecordingBackend if all_reduce == "backend" else Recording)(summing, self._clock)
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
        self._clock.start()
        taken = [self._step() for _ in range(steps)]
        return [step.read(self._clock.seconds) for step in taken]

    def compute(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` backward passes without synchronization. All ranks start together."""
        dist.barrier()
        self._clock.start()
        passes = []
        for _ in range(steps):
            with self._model.no_sync():
                loss = self._forward(next(self._batches))
                began = self._clock.stamp()
                loss.backward()
                passes.append((began, self._clock.stamp()))
            self._optimizer.zero_grad(set_to_none=True)
        return [self._clock.seconds(ended) - self._clock.seconds(began) for began, ended in passes]

    def _step(self) -> Step:
        step = Step(self._clock.stamp())
        self._all_reduce.sent = step.sent
        batch = next(self._batches)
        step.loaded = self._clock.stamp()
        loss = self._forward(batch)
        step.forwarded = self._clock.stamp()
        loss.backward()
        step.returned = self._clock.stamp()
        set_learning_rate(self._optimizer, self._config.learning_rates(self._sampler.steps_per_epoch)(self._steps))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        step.ended = self._clock.stamp()
        step.ready, step.handled = list(self._ready.values()), list(self._handled.values())
        self._steps += 1
        return step

    def _forward(self, batch: Batch) -> Tensor:
        inputs = self._data.to_input(batch.images, self._config.memory_format)
        return F.cross_entropy(self._model(inputs), batch.labels)

    def _record_into(self, ready: dict[str, float], handled: dict[str, float]) -> None:
        """Register hooks on each parameter that record when its gradient is ready, and when DDP has handled it."""

        def record(moments: dict[str, float], name: str, *_: object) -> None:
            moments[name] = self._clock.stamp()

        for name, parameter in self._parameters.items():
            # DDP's hook is on the node that accumulates the gradient. The node calls its hooks after those of the parameter.
            parameter.register_post_accumulate_grad_hook(functools.partial(record, ready, name))
            get_gradient_edge(parameter).node.register_hook(functools.partial(record, handled, name))

    def _endless_batches(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            self._sampler.set_epoch(epoch)
            for key in self._sampler:
                images, labels = self._data.train.__getitems__(key)
                yield Batch(images.to(self._device), labels.to(self._device))
