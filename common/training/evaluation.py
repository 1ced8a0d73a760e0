"""Exact evaluation: every test sample counts once, on however many ranks.

Each rank adds up a confusion matrix over its own share of the test set, and the matrices are summed once, at the end. So
no collective runs per batch, and one rank may have a batch more than another. (Of a sharded model each forward pass is a
collective: ddp/sharded/equal_batches.py.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.data.datasets import Batch, BatchKey, ImageData
from common.distributed.dist_env import DistEnv
from common.errors import printable
from common.models.modules import evaluating
from common.training.precision import autocast

# Images of 28 x 28 per rank, by the device's type. Without gradients, memory holds more than in training, and a GPU is not busy
# with fewer. A batch of larger images has fewer.
BATCH_SIZES = {"cpu": 500, "cuda": 2048}
SMALLEST_BATCH_SIZE = 32
MOST_NAMED_COLUMNS = 12


@dataclass(frozen=True)
class Evaluation:
    """A model's result on a test set.

    :param loss: mean cross-entropy per sample (of text, per character), without label smoothing
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
        with np.errstate(invalid="ignore"):  # 0 / 0
            shares: npt.NDArray[np.float64] = self.confusion.diagonal() / self.confusion.sum(axis=1)
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


def evaluation_batch_size(shape: tuple[int, int, int], device: torch.device) -> int:
    """Images of ``shape`` (channels, height, width) that are evaluated at once on a device."""
    _, height, width = shape
    most = BATCH_SIZES[device.type]
    return min(most, max(SMALLEST_BATCH_SIZE, most * 28 * 28 // (height * width)))


@torch.inference_mode()
def evaluate(network: nn.Module, data: ImageData, env: DistEnv, precision: str, shard: Iterable[Batch]) -> Evaluation:
    """Evaluate on the test set, its samples divided over the ranks. Nothing is read from a GPU before the last batch.

    :param network: the plain module, its parameters and buffers the same on every rank, or one that is sharded; left in the
        mode it was in
    :param precision: one of :data:`common.training.precision.PRECISIONS`
    :param shard: this rank's batches of ``data.test``; all ranks' shards together hold every sample once
    :returns: the same on every rank
    :raises UsageError: on every rank, when one cannot read a file
    """
    classes = len(data.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=env.device)
    loss = torch.zeros((), dtype=torch.float64, device=env.device)

    with evaluating(network), env.fail_together():
        for images, labels in shard:
            images, labels = images.to(env.device, non_blocking=True), labels.to(env.device, non_blocking=True)
            with autocast(env.device, precision):
                logits = network(data.to_input(images))
            loss += F.cross_entropy(logits.float(), labels, reduction="sum")
            counts = (labels >= 0).long()  # of text, the end of a line has no target
            pairs = (labels * classes + logits.argmax(1)) * counts
            confusion.view(-1).scatter_add_(
                0, pairs.flatten(), counts.flatten()
            )  # bincount would wait, for the largest

    env.sum_over_ranks(loss)  # the only communication: two small sums
    env.sum_over_ranks(confusion)
    samples = max(1, int(confusion.sum()))  # none, if all ranks were stopped before their first batch
    return Evaluation(loss.item() / samples, confusion.cpu().numpy())


def samples_shown(data: ImageData, device: torch.device) -> Batch:
    """The first samples of the test set, as many as are evaluated at once on a device. A run's report shows some of them.

    :raises UsageError: when a file cannot be read
    """
    return data.test.__getitems__(
        BatchKey(0, np.arange(min(evaluation_batch_size(data.shape, device), len(data.test))))
    )


@torch.inference_mode()
def predict(network: nn.Module, data: ImageData, env: DistEnv, images: Tensor, precision: str = "fp32") -> Tensor:
    """The predicted classes of uint8 images ``[n, channels, height, width]``, on this rank alone if the network is a replica.

    :returns: int64 ``[n]``, or as many as there are labels, on the CPU
    """
    with evaluating(network), autocast(env.device, precision):
        return network(data.to_input(images.to(env.device))).argmax(1).cpu()  # type: ignore[no-any-return]


def table(result: Evaluation, classes: tuple[str, ...], unit: str = "samples") -> str:
    """The confusion matrix as text, with each class's accuracy; of many classes, the columns are numbered.

    :param unit: what is counted
    """
    columns = classes = tuple(map(printable, classes))
    if len(classes) > MOST_NAMED_COLUMNS:
        columns = tuple(str(number) for number in range(1, len(classes) + 1))
        classes = tuple(f"{name} {number:>3}" for name, number in zip(classes, columns, strict=True))
    width = max(len(name) for name in classes)
    column = max(len(str(result.confusion.max())), *map(len, columns)) + 1
    lines = [" " * (width + 11) + "".join(f"{name:>{column}}" for name in columns) + "   <- predicted"]
    for name, share, counts in zip(classes, result.class_accuracy, result.confusion, strict=True):
        lines.append(f"{name:>{width}} {100 * share:7.2f} % " + "".join(f"{count:>{column}}" for count in counts))
    lines.append(
        f"accuracy {100 * result.accuracy:.2f} %: {result.confusion.trace()} of {result.confusion.sum()} {unit}, "
        f"loss {result.loss:.4f}"
    )
    return "\n".join(lines)
