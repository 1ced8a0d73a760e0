"""The recording of training steps: the service of a rank, and collectives that are recorded from outside.

A step is a list of spans. In one lane, :data:`ddp.timeline.parts.COMPUTE`, the phases of the step follow each other (``data``,
``forward``, ``backward``, ``optimizer``), and within a phase the laps of what the rank does: it computes something, copies, or waits.
Collectives have lanes of their own. On a GPU the moments are those of its streams, so the host may run ahead of the GPU, as it does
in training.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from common.distributed.process_group import DistEnv
from common.reporting.clock import clock_of
from common.reporting.spans import Recorder, Span
from ddp.all_reduce.base import AllReduce, Pending
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.timeline.parts import COMPUTE


class StepRecorder(abc.ABC):
    """The service of one rank: it trains, and records the spans of each step. A subclass sets the model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    def __init__(self, env: DistEnv) -> None:
        self.recorder = Recorder(clock_of(env.device))

    @abc.abstractmethod
    def facts(self) -> dict[str, Any]:
        """Facts of the model, final after the first step."""

    @abc.abstractmethod
    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Make the next batch: the model's inputs, and the classes of its outputs."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the loss."""
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, averaged over the ranks."""
        loss.backward()

    def update(self) -> None:
        """Take a step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @abc.abstractmethod
    def name_of(self, buffer: Tensor) -> str:
        """The name of the collective of this tensor."""

    def lap(self, name: str, *_: object) -> None:
        """End a lap. It can be a hook."""
        self.recorder.lap(name, COMPUTE)

    def run(self, steps: int) -> list[list[Span]]:
        """Take some steps. All ranks start together."""
        self.start_together()
        taken = []
        for _ in range(steps):
            self._step()
            taken.append(self.recorder.take())
        return list(map(self.recorder.read, taken))

    def start_together(self) -> None:
        """Wait for all ranks, and for this rank's earlier work."""
        dist.barrier()
        self.recorder.clock.start()

    def _step(self) -> None:
        phase = functools.partial(self.recorder.span, lane=COMPUTE)
        with phase("step"):
            with phase("data"):
                batch = self.next_batch()
            with phase("forward"):
                loss = self.forward(batch)
            with phase("backward"):
                self.backward(loss)
            with phase("optimizer"):
                self.update()


class RecordedCollectives(ShardedAllReduce):
    """Runs another's collectives one after the other in a background thread, and records each.

    :param inner: has a reduce-scatter and an all-gather if they are asked for
    :param steps: names the collectives, and has the recorder
    """

    def __init__(self, inner: AllReduce, steps: StepRecorder) -> None:
        super().__init__()
        self._inner: Any = inner
        self._steps: Any = steps

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory: Tensor = self._inner.allocate(numel, dtype, device)
        return memory

    def run(self, buffer: Tensor) -> None:
        self._recorded("all-reduce", self._inner.run, buffer)

    def all_gather(self, buffer: Tensor) -> None:
        self._recorded("gather", self._inner.all_gather, buffer)

    def reduce_scatter(self, buffer: Tensor) -> None:
        self._recorded("reduce-scatter", self._inner.reduce_scatter, buffer)

    def close(self) -> None:
        super().close()
        self._inner.close()

    def _recorded(self, lane: str, collective: Callable[[Tensor], None], buffer: Tensor) -> None:
        with self._steps.recorder.span(self._steps.name_of(buffer), lane):
            collective(buffer)


class RecordedBackend(RecordedCollectives):
    """Records the backend's own all-reduces: gloo runs several at a time, and NCCL in a stream of its own."""

    # It does nothing but wait for NCCL's sums, so an event in it tells when they end.
    _waiting: torch.cuda.Stream | None = None

    def start(self, buffer: Tensor) -> Pending:
        recorder, name = self._steps.recorder, self._steps.name_of(buffer)
        started = recorder.clock.stamp()

        def record_end() -> None:
            recorder.add(name, started, recorder.clock.stamp(), "all-reduce")

        def end_of_gloo(future: torch.futures.Future[Any]) -> None:
            record_end()
            future.wait()  # raises the error of a failed all-reduce

        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        if buffer.device.type == "cpu":
            # gloo's own thread records the end. A waiting thread would first have to get a core.
            return work.get_future().then(end_of_gloo)
        self._waiting = self._waiting or torch.cuda.Stream(buffer.device)
        with torch.cuda.stream(self._waiting):
            work.wait()  # the stream waits, not the host
            record_end()
        return work
