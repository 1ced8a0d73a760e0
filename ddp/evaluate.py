"""Exact evaluation: every test sample counts once, at every world size.

    torchrun --nproc_per_node=2 -m ddp.evaluate --run-dir runs/glyphs-fashion-cnn

``DistributedSampler`` pads the last batch with repeated samples, which count twice (pytorch#25162). Here the ranks divide
the test set without padding; some may have a batch more than others, which is why the plain module is called, not its DDP
wrapper, and why the counts cross the network once, at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cli import command, option, parse
from common.datasets import Batch, ImageData
from common.models import build_model
from common.precision import PRECISIONS, Precision
from common.process_group import BACKENDS, DEVICES, Place, process_group
from common.rank_logging import rank_logging
from ddp import checkpoint
from ddp.config import WITHOUT_WORKERS, Loading, TrainConfig
from ddp.data import Loader, load_data, open_loader
from ddp.sampler import ShardSampler

# Per rank; without gradients there is room for more than in training. Of larger images, fewer.
BATCH_SIZE = 500
BATCH_PIXELS = 500 * 28 * 28
SMALLEST_BATCH_SIZE = 32
MOST_NAMED_COLUMNS = 12


@dataclass(frozen=True)
class Evaluation:
    """A model's result on a test set.

    :param loss: mean cross-entropy per sample, without label smoothing
    :param confusion: int64 ``[classes, classes]``, counts: rows are true classes, columns predicted ones
    """

    loss: float
    confusion: npt.NDArray[np.int64]

    @property
    def accuracy(self) -> float:
        """Share of all samples that were recognized."""
        return float(self.confusion.trace() / self.confusion.sum())

    @property
    def class_accuracy(self) -> npt.NDArray[np.float64]:
        """Share of each class's samples that were recognized; nan for a class without samples."""
        samples = self.confusion.sum(axis=1)
        shares = np.full(len(samples), np.nan)
        np.divide(self.confusion.diagonal(), samples, out=shares, where=samples > 0)
        return shares

    def as_dict(self, classes: tuple[str, ...]) -> dict[str, object]:
        """For JSON."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "samples": int(self.confusion.sum()),
            "class_accuracy": dict(zip(classes, self.class_accuracy.tolist(), strict=True)),
            "confusion": self.confusion.tolist(),
        }


def open_test_loader(data: ImageData, place: Place, loading: Loading = WITHOUT_WORKERS) -> Loader:
    """Brings this rank's part of the test set."""
    _, height, width = data.shape
    batch_size = min(BATCH_SIZE, max(SMALLEST_BATCH_SIZE, BATCH_PIXELS // (height * width)))
    shard = ShardSampler(len(data.test), batch_size, place.world_size, place.rank)
    return open_loader(data.test, shard, place.device, loading)


@torch.inference_mode()
def evaluate(
    network: nn.Module, data: ImageData, place: Place, precision: Precision, share: Iterable[Batch] | None = None
) -> Evaluation:
    """Evaluate on the test set, its samples divided over the ranks.

    :param network: the plain module, its parameters and buffers the same on every rank; left in the mode it was in
    :param share: this rank's batches, which :func:`open_test_loader` brings; with None, they are fetched one by one
    :returns: the same on every rank
    :raises UsageError: on every rank, when one cannot read a file
    """
    classes = len(data.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=place.device)
    loss = torch.zeros((), dtype=torch.float64, device=place.device)
    if share is None:
        share = open_test_loader(data, place)

    was_training = network.training
    network.eval()
    with place.together():
        for images, labels in share:
            labels = labels.to(place.device)
            with precision.autocast():
                logits = network(data.to_input(images.to(place.device)))
            loss += F.cross_entropy(logits.float(), labels, reduction="sum")
            pairs = labels * classes + logits.argmax(1)
            confusion += torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    network.train(was_training)

    place.sum_over_ranks(loss)  # the only communication: two small sums
    place.sum_over_ranks(confusion)
    return Evaluation(loss.item() / len(data.test), confusion.cpu().numpy())


@torch.inference_mode()
def predict(network: nn.Module, data: ImageData, place: Place, images: Tensor) -> list[int]:
    """The predicted classes of uint8 images ``[n, channels, height, width]``, on this rank alone."""
    was_training = network.training
    network.eval()
    predictions: list[int] = network(data.to_input(images.to(place.device))).argmax(1).tolist()
    network.train(was_training)
    return predictions


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of ``ddp.evaluate``; the model, the data set and the way it is loaded are those of the run."""

    run_dir: Path = option(Path("runs/glyphs-fashion-cnn"), "directory of the run whose newest checkpoint is evaluated")
    data_dir: str | None = option(None, "where fashion-mnist or lfw lies (default: the run's)")
    test_samples: int | None = option(None, "test on the first so many samples only", minimum=1)
    precision: str = option("fp32", "of the evaluation, whatever the run was trained in", choices=PRECISIONS)
    device: str = option("auto", "auto takes CUDA where there is any", choices=DEVICES)
    backend: str = option("auto", "auto takes nccl on CUDA and gloo on the CPU", choices=BACKENDS)


@command
def main() -> None:
    config = parse(EvaluateConfig, "ddp.evaluate", __doc__)
    with process_group(config.device, config.backend) as place, rank_logging(place):
        loaded = checkpoint.load_together(config.run_dir, place)
        run = TrainConfig(**loaded["config"])
        # The training samples too: the images are normalized by their mean and standard deviation.
        run = dataclasses.replace(
            run, data_dir=config.data_dir or run.data_dir, test_samples=config.test_samples, download=False
        )
        data = load_data(run, place)
        network = build_model(run.model, data.shape, len(data.classes))
        checkpoint.load_model(network, loaded)
        precision = Precision(config.precision, place.device)
        share = open_test_loader(data, place, run.loading)
        result = evaluate(network.to(place.device), data, place, precision, share)
        if place.is_main:
            print(table(result, data.classes))


def table(result: Evaluation, classes: tuple[str, ...]) -> str:
    """The confusion matrix as text, with each class's accuracy; of many classes, the columns are numbered."""
    columns = classes
    if len(classes) > MOST_NAMED_COLUMNS:
        columns = tuple(str(number) for number in range(1, len(classes) + 1))
        classes = tuple(f"{name} {number:>3}" for name, number in zip(classes, columns, strict=True))
    width = max(len(name) for name in classes)
    column = max(len(str(result.confusion.max())), *map(len, columns)) + 1
    lines = [" " * (width + 11) + "".join(f"{name:>{column}}" for name in columns) + "   <- predicted"]
    for name, share, counts in zip(classes, result.class_accuracy, result.confusion, strict=True):
        lines.append(f"{name:>{width}} {100 * share:7.2f} % " + "".join(f"{count:>{column}}" for count in counts))
    lines.append(
        f"accuracy {100 * result.accuracy:.2f} %: {result.confusion.trace()} of {result.confusion.sum()} samples, "
        f"loss {result.loss:.4f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
