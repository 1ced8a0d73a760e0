"""Metrics of a few training steps over all ranks: loss, accuracy, time, and how long they waited for data."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.data.datasets import Batch
from common.distributed.dist_env import DistEnv
from common.distributed.rank_logging import Progress
from common.training.device_meter import DeviceMeter, DeviceTotals
from common.training.evaluation import Evaluation


@dataclass(frozen=True)
class WindowTotals:
    """A window of training steps, over all ranks.

    :param loss: mean per sample
    :param accuracy: share of the training samples recognized as they were trained on
    :param seconds: wall time
    :param data_wait: share of it that the ranks spent waiting for their next batch
    """

    samples: int
    loss: float
    accuracy: float
    seconds: float
    data_wait: float

    @property
    def images_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    def as_record(self) -> dict[str, float]:
        """For ``metrics.jsonl``."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
            "images_per_s": self.images_per_s,
            "data_wait": self.data_wait,
        }

    @classmethod
    def merge(cls, windows: list[WindowTotals]) -> WindowTotals:
        """Several windows as one; those without a sample, all of whose steps were skipped, have only taken time."""
        samples = sum(w.samples for w in windows)
        seen = [w for w in windows if w.samples]
        seconds = sum(w.seconds for w in windows)
        return cls(
            samples,
            sum(w.loss * w.samples for w in seen) / samples if seen else math.nan,
            sum(w.accuracy * w.samples for w in seen) / samples if seen else math.nan,
            seconds,
            sum(w.data_wait * w.seconds for w in windows) / seconds if seconds else 0.0,
        )


class WindowState(NamedTuple):
    """An unfinished window of one rank: sums over its samples, and the seconds it waited and lasted."""

    loss: float = 0.0
    correct: float = 0.0
    samples: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    @classmethod
    def redistribute(cls, states: Sequence[WindowState], world_size: int) -> list[WindowState]:
        """The states of as many ranks as there are now: as they were, or all samples on rank 0."""
        if len(states) == world_size:
            return list(states)
        loss, correct, samples, waited, seconds = (sum(values) for values in zip(*states, strict=True))
        lasted = seconds / len(states)
        return [cls(loss, correct, int(samples), waited, lasted), *[cls(seconds=lasted)] * (world_size - 1)]


class Window:
    """Sums over a few steps on this rank. Nothing is read from the device before :meth:`reduce`, since each such read
    would make the host wait for the device.

    ``meter`` measures what a GPU does meanwhile, and ``on_gpu`` is what it measured in the last window; None on a CPU.

    :param micro_steps: micro-batches of an optimizer step
    """

    def __init__(self, device: torch.device, micro_steps: int = 1) -> None:
        self.meter: DeviceMeter | None = None
        if device.type == "cuda":
            self.meter = DeviceMeter(device, micro_steps)
        self.on_gpu: DeviceTotals | None = None
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
        self._marked = torch.zeros_like(self._sums)
        self._waited = self._lasted = 0.0  # _lasted: of a window that a checkpoint held
        self._began = time.perf_counter()

    def begin(self) -> None:
        """An epoch begins, or goes on. The time that lay between the epochs does not count."""
        self._began = time.perf_counter() - self._lasted

    def next_of(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch; None at the end of the epoch. The time until it comes counts as waiting for data."""
        began = time.perf_counter()
        batch = next(batches, None)
        self._waited += time.perf_counter() - began
        if self.meter is not None and batch is not None:
            self.meter.begin()
        return batch

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """An epoch's batches, each by :meth:`next_of`."""
        self.begin()
        while (batch := self.next_of(batches)) is not None:
            yield batch
            self.end_batch()

    def end_batch(self) -> None:
        """All work on a micro-batch is queued. The host's work after that is not its time."""
        if self.meter is not None:
            self.meter.end()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """A micro-batch: its mean loss (0-d), logits ``[n, classes, ...]`` and labels ``[n, ...]``. Negative ones do not count."""
        correct, samples = (logits.detach().argmax(1) == labels).sum(), (labels >= 0).sum()
        self._sums += torch.stack([loss.detach() * samples, correct, samples])

    def reduce(self, env: DistEnv) -> WindowTotals:
        """The totals over all ranks, by one all-reduce, and the beginning of the next window."""
        if self.meter is not None:
            self.on_gpu = self.meter.read(env)  # waits: the steps that are queued belong to this window
        seconds = time.perf_counter() - self._began
        sums = torch.cat([self._sums, self._sums.new_tensor([self._waited, seconds])])
        loss, correct, samples, waited, seconds = env.sum_over_ranks(sums).tolist()
        self.restore(WindowState())
        share = 1 / samples if samples else math.nan  # none, if all of its steps were skipped
        return WindowTotals(int(samples), loss * share, correct * share, seconds / env.world_size, waited / seconds)

    def mark(self) -> None:
        """Remember the sums, for :meth:`rewind`."""
        self._marked.copy_(self._sums)

    def rewind(self, where: Tensor | None = None) -> None:
        """Forget the batches that were added since :meth:`mark`; the time that they took still counts.

        :param where: bool 0-d, on the device: whether to forget them; always when None. The host need not know it
        """
        self._sums.copy_(self._marked if where is None else torch.where(where, self._marked, self._sums))

    def state(self) -> WindowState:
        """Its content, for a checkpoint."""
        loss, correct, samples = self._sums.tolist()
        return WindowState(loss, correct, int(samples), self._waited, time.perf_counter() - self._began)

    def restore(self, state: WindowState) -> None:
        """Go on from there."""
        self._sums.copy_(torch.tensor([state.loss, state.correct, state.samples], dtype=torch.float64))
        self._waited, self._lasted = state.waited, state.seconds
        self._began = time.perf_counter() - self._lasted


def end_window(
    window: Window,
    env: DistEnv,
    step: int,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    record: Callable[..., None],
    progress: Progress | None,
    unit: str = "images",
) -> WindowTotals:
    """End the window after this step: sum it over the ranks, record it, show it. Returns the totals.

    :param record: called with ``"step"``, the step and the values by name
    :param unit: what is counted
    """
    totals, rate = window.reduce(env), optimizer.param_groups[0]["lr"]
    numbers, facts = totals.as_record(), f"loss {totals.loss:.3f}, lr {rate:.2g}, {totals.images_per_s:,.0f} {unit}/s"
    if window.on_gpu is not None:
        numbers, facts = numbers | window.on_gpu.as_record(), f"{facts}, {window.on_gpu}"
    record("step", step, learning_rate=rate, loss_scale=scaler.get_scale(), **numbers)
    if progress is not None:
        progress.reach(step, facts)
    return totals


def epoch_record(totals: WindowTotals, result: Evaluation) -> dict[str, float]:
    """An epoch for ``metrics.jsonl``: its training steps and the evaluation after them."""
    return {**totals.as_record(), "test_loss": result.loss, "test_accuracy": result.accuracy}


def epoch_line(epoch: int, epochs: int, totals: WindowTotals, result: Evaluation, unit: str = "images") -> str:
    """An epoch for the log.

    :param epoch: counted from 1
    :param unit: what is counted
    """
    return (
        f"epoch {epoch} of {epochs}: train loss {totals.loss:.4f}, test loss {result.loss:.4f}, "
        f"test accuracy {100 * result.accuracy:.2f} %, {totals.images_per_s:,.0f} {unit}/s"
    )
