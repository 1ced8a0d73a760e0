"""Image data sets that return whole batches, and those that are held in memory as uint8.

``DataLoader`` asks a data set with ``__getitems__`` for all samples of a batch in one call. For images in memory, that is one
indexing operation instead of a Python loop and a collate.

A whole batch is augmented at once, as a pure function of (seed, epoch, sample). The images stay uint8: a shift and a flip need no
arithmetic, and a batch of uint8 is a quarter of the size when it is copied to the device. Nothing here has state. So a sample
looks the same in one epoch whichever worker or rank fetches it, at every world size, and different in the next epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.utils.data import Dataset

from common.errors import UsageError
from common.randomness import uniform

IN_MEMORY = ("glyphs", "fashion-mnist")


class BatchKey(NamedTuple):
    """A sampler's request: these samples, as they look in this epoch.

    The epoch travels with the request because persistent loader workers hold a copy of the data set that never sees a
    ``set_epoch``.
    """

    epoch: int
    samples: npt.NDArray[np.int64]


class Batch(NamedTuple):
    """Images uint8 ``[n, channels, height, width]`` and labels int64 ``[n]``; of text, see ddp/sums.py."""

    images: Tensor
    labels: Tensor


class Images(Protocol):
    """One half of a data set: the training or the test images, in memory or in files."""

    @property
    def labels(self) -> npt.NDArray[np.int64]: ...

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""

    def __len__(self) -> int: ...

    def __getitems__(self, key: BatchKey) -> Batch:
        """Fetch a batch: what ``DataLoader`` calls, in a worker or in the main process."""


@dataclass(frozen=True)
class Augmentation:
    """Random shift and mirroring of training images.

    :param shift: maximum pixels by which an image moves in each direction
    :param flip: whether it may be mirrored left to right
    :param fill: the value of uncovered pixels
    """

    shift: int = 0
    flip: bool = False
    fill: int = 0

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return bool(self.shift or self.flip)

    def draw(
        self, seed: int, epoch: int, samples: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The draws of each sample in this epoch: where the frame lies on the image with its border, and whether it is mirrored.

        :param samples: int64 ``[n]``
        :returns: rows from the top and columns from the left, int64 ``[n]`` of 0 to ``2 * shift``, and bool ``[n]``
        """
        draws = uniform(3, seed, "augmentation", epoch, samples)  # [n, 3]: down, right, mirrored?
        down, right = (draws[:, :2] * (2 * self.shift + 1)).astype(np.int64).T
        return down, right, (draws[:, 2] < 0.5) & self.flip

    def __call__(
        self, images: npt.NDArray[np.uint8], seed: int, epoch: int, samples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint8]:
        """Augment a batch.

        :param images: uint8 ``[n, channels, height, width]``, not changed
        :param samples: int64 ``[n]``, the images' indices in the data set
        :returns: a new uint8 array of the same shape
        """
        n, channels, height, width = images.shape
        down, right, mirrored = self.draw(seed, epoch, samples)
        border = self.shift
        canvas = np.full((n, channels, height + 2 * border, width + 2 * border), self.fill, np.uint8)
        canvas[:, :, border : border + height, border : border + width] = images
        windows = sliding_window_view(canvas, (height, width), axis=(2, 3))  # every position of the frame on the canvas
        result = windows[np.arange(n), :, down, right]
        result[mirrored] = result[mirrored][..., ::-1]
        return result


NO_AUGMENTATION = Augmentation()


class ImageDataset(Dataset[Batch]):
    """Images and labels in memory.

    :param images: uint8 ``[samples, channels, height, width]``
    :param labels: int64 ``[samples]``
    :param augmentation: of a fetched batch, a pure function of (seed, epoch, sample)
    :param seed: of the augmentation
    """

    def __init__(
        self,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.int64],
        augmentation: Augmentation = NO_AUGMENTATION,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = images, labels
        self.augmentation, self.seed = augmentation, seed

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def __getitems__(self, key: BatchKey) -> Batch:
        images = self.images[key.samples]
        if self.augmentation:
            images = self.augmentation(images, self.seed, key.epoch, key.samples)
        return Batch(torch.from_numpy(images), torch.from_numpy(self.labels[key.samples]))


def fetch_batches(images: Images, samples: npt.NDArray[np.int64], batch_size: int, epoch: int = 0) -> Iterator[Batch]:
    """Fetch samples in this process, in the given order and augmented for this epoch; the last batch may be smaller."""
    for start in range(0, len(samples), batch_size):
        yield images.__getitems__(BatchKey(epoch, samples[start : start + batch_size]))


def keep_batch(batch: Batch) -> Batch:
    """The ``collate_fn`` for a data set that returns whole batches."""
    return batch


@dataclass(frozen=True)
class ImageData:
    """A data set: training and test images, class names, and the pixel statistics for normalization.

    :param classes: names, in the order of the labels
    :param mean: of the training images' pixels, on a scale of 0 to 1
    :param std: their standard deviation
    :param fingerprint: a digest of the data, compared when a run is resumed
    :param unit: what accuracy counts, each with one label: images or characters
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: float
    std: float
    fingerprint: str
    unit: str = "images"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return self.train.shape

    @property
    def is_text(self) -> bool:
        """Whether a sample is a line of characters, each with a label, instead of an image with one."""
        return self.unit == "characters"

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a sample's labels."""
        return self.shape[2:] if self.is_text else ()

    @property
    def test_unit(self) -> str:
        """The name of the samples that an evaluation counts."""
        return "samples" if self.unit == "images" else self.unit

    def to_input(self, images: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        """The model's input: uint8 images become float32 of mean 0 and standard deviation 1, on the same device."""
        return (
            images.to(torch.float32, memory_format=memory_format).mul_(1 / (255 * self.std)).sub_(self.mean / self.std)
        )


class Loader(Protocol):
    """The batches of an epoch, each time it is iterated over."""

    dataset: Any
    num_workers: int

    def __iter__(self) -> Iterator[Batch]: ...


def load(
    name: str,
    folder: Path | None = None,
    *,
    train_samples: int | None = None,
    test_samples: int | None = None,
    augmentation: Augmentation = NO_AUGMENTATION,
    seed: int = 0,
) -> ImageData:
    """Load a data set of :data:`IN_MEMORY`.

    :param folder: of ``fashion-mnist``: torchvision's layout, or simply its four files
    :param train_samples: use only the first so many; all when None
    :param test_samples: likewise
    :param seed: of the augmentation. The data itself is the same for every seed.
    :raises UsageError: when files are missing, damaged, of another data set or not needed, or have too few samples
    """
    if name == "glyphs" and folder is not None:
        raise UsageError(f"--data-dir {folder} is for fashion-mnist and files: glyphs are rendered, not read")
    if name not in IN_MEMORY:
        raise ValueError(f"there is no data set {name!r}: {', '.join(IN_MEMORY)}")
    source: ModuleType
    if name == "glyphs":
        from common.data import glyphs as source  # here, since it imports Pillow
    else:
        from common.data import fashion_mnist as source
    splits = {}
    for split, limit in (("train", train_samples), ("test", test_samples)):
        count = first_samples(split, limit, source.SAMPLES[split], name)
        images, labels = source.render(split, count) if name == "glyphs" else source.read(folder, split)
        splits[split] = images[:count, None], labels[:count]

    images, labels = splits["train"]
    mean, std = mean_and_std(images)
    return ImageData(
        name=name,
        train=ImageDataset(images, labels, replace(augmentation, fill=source.BACKGROUND), seed),
        test=ImageDataset(*splits["test"]),
        classes=tuple(source.CLASSES),
        mean=mean,
        std=std,
        fingerprint=fingerprint_of(splits.values()),
    )


def fingerprint_of(splits: Iterable[Iterable[npt.NDArray[Any]]]) -> str:
    """A digest of the images and labels of each half."""
    return hashlib.sha256(b"".join(array.tobytes() for arrays in splits for array in arrays)).hexdigest()[:16]


def first_samples(split: str, limit: int | None, available: int, name: str) -> int:
    """The number of samples of a half that are used: the first ``limit``, or all that are ``available``.

    :raises UsageError: when there are fewer
    """
    if limit is not None and limit > available:
        raise UsageError(f"--{split}-samples {limit} is more than the {available:,} that {name} has")
    return available if limit is None else limit


def mean_and_std(images: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and standard deviation of all pixels, on a scale of 0 to 1.

    Counting is exact, and so the same on every machine. It goes in parts, since bincount makes an int64 copy of its input.
    """
    histogram = np.sum([np.bincount(part.reshape(-1), minlength=256) for part in np.array_split(images, 100)], axis=0)
    levels = np.arange(256) / 255
    mean = float(histogram @ levels / histogram.sum())
    return mean, float(np.sqrt(histogram @ (levels - mean) ** 2 / histogram.sum()))
