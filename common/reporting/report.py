"""What a run says of itself: windows of steps, the figures, and the summary."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from common.data.datasets import BatchKey, ImageData
from common.distributed.process_group import DistEnv
from common.reporting.run_directory import write_json
from common.reporting.run_figures import plot_confusion, plot_curves, plot_samples
from common.training.evaluation import Evaluation, predict
from common.training.metrics import read_metrics

SAMPLES_SHOWN = 32


@dataclass(frozen=True)
class WindowTotals:
    """A window of training steps, over all ranks.

    :param loss: mean per sample; :param accuracy: share of the training samples recognized as they were trained on
    :param seconds: wall time; :param data_wait: share of it that the ranks spent waiting for their next batch
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
    would make the host wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, correct
        self._samples = 0
        self._waited = 0.0
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent in this block is spent waiting for data."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """A micro-batch: its mean loss (0-d), logits ``[n, classes]`` and labels ``[n]``."""
        correct = (logits.detach().argmax(1) == labels).sum()
        self._sums += torch.stack([loss.detach() * len(labels), correct])
        self._samples += len(labels)

    def reduce(self, env: DistEnv) -> WindowTotals:
        """The totals over all ranks, by one all-reduce, and the beginning of the next window."""
        if env.device.type == "cuda":
            torch.cuda.synchronize(env.device)  # the steps that are queued belong to this window
        seconds = time.perf_counter() - self._began
        sums = torch.cat([self._sums, self._sums.new_tensor([self._samples, self._waited, seconds])])
        loss, correct, samples, waited, taken = env.sum_over_ranks(sums).tolist()
        self.restore(WindowState())
        share = 1 / samples if samples else math.nan  # none, if all of its steps were skipped
        return WindowTotals(int(samples), loss * share, correct * share, taken / env.world_size, waited / taken)

    def state(self) -> WindowState:
        """What is in it, for a checkpoint."""
        loss, correct = self._sums.tolist()
        return WindowState(loss, correct, self._samples, self._waited, time.perf_counter() - self._began)

    def restore(self, state: WindowState) -> None:
        """Go on from there."""
        self._sums.copy_(torch.tensor([state.loss, state.correct], dtype=torch.float64))
        self._samples, self._waited, self._began = state.samples, state.waited, time.perf_counter() - state.seconds


def data_verdict(data_wait: float, remedies: Sequence[str] = ()) -> str:
    """In plain words, whether training waits for its data.

    It is the host's view: on a GPU, a wait may be hidden by work that is still queued.

    :param remedies: flags that may bring the data sooner, to name should it come late
    """
    share = f"{100 * data_wait:.0f} % of each step waits for data"
    if data_wait < 0.1:
        return f"compute-bound: {share}"
    advice = f"; try {' or '.join(remedies)}" if remedies else ""
    return f"{'partly ' if data_wait < 0.3 else ''}data-bound: {share}{advice}"


def finish(
    run_dir: Path,
    title: str,
    network: nn.Module,
    data: ImageData,
    env: DistEnv,
    result: Evaluation,
    remedies: Sequence[str] = (),
) -> str:
    """Draw the figures, write ``result.json``, and return the summary. For rank 0, when the run is complete.

    :param run_dir: which holds the run's ``metrics.jsonl``
    :param network: the plain module; :param result: that of its evaluation
    :param remedies: as in :func:`data_verdict`
    """
    records = read_metrics(run_dir)
    epochs = [r for r in records if r["kind"] == "epoch"]
    seconds = sum(r["seconds"] for r in epochs)
    totals: dict[str, Any] = {
        "epochs": len(epochs),
        "train_seconds": seconds,
        "images_per_s": sum(r["seconds"] * r["images_per_s"] for r in epochs) / seconds,
        "data_wait": sum(r["seconds"] * r["data_wait"] for r in epochs) / seconds,
    }
    write_json(run_dir / "result.json", {**totals, "test": result.as_dict(data.classes)})

    shown = data.test.__getitems__(BatchKey(0, np.arange(min(SAMPLES_SHOWN, len(data.test)))))
    plot_curves(run_dir / "curves.png", records, title)
    plot_confusion(run_dir / "confusion.png", result.confusion, data.classes, title)
    predictions = predict(network, data, env, shown.images)
    plot_samples(run_dir / "samples.png", shown.images.numpy(), shown.labels.tolist(), predictions, data.classes, title)
    return (
        f"test accuracy {100 * result.accuracy:.2f} % after {totals['epochs']} epochs "
        f"({result.confusion.trace()} of {result.confusion.sum()} samples)\n"
        f"{seconds:.0f} s of training, {totals['images_per_s']:,.0f} images/s\n"
        f"{data_verdict(totals['data_wait'], remedies)}\n"
        f"results in {run_dir}: curves.png, confusion.png, samples.png, result.json, metrics.jsonl"
    )
