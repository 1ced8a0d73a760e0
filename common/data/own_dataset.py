"""A data set of one's own, by ``--dataset module:function``.

The function takes no arguments and returns ``(train, test, class_names)``. Each of the two halves is one of:

- ``(images, labels)``: two arrays or tensors, the images uint8 ``[samples, channels, height, width]`` or
  ``[samples, height, width]``, the labels integers ``[samples]``;
- a map-style data set, with ``__len__`` and ``__getitem__(index) -> (image, label)``, the image a Pillow image or a uint8 array or
  tensor ``[channels, height, width]`` or ``[height, width]``.

``class_names[label]`` is a label's name. Images stay uint8 of 0 to 255: the trainer normalizes them. The function may also
return a :class:`~common.data.datasets.ImageData`, which is taken as it is.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from common.command_line.functions import import_function
from common.data.datasets import (
    NO_AUGMENTATION,
    Augmentation,
    Batch,
    BatchKey,
    ImageData,
    ImageDataset,
    Images,
    first_samples,
    mean_and_std,
)
from common.data.loaders import BadSample
from common.data.rgb import NoRange, to_rgb
from common.errors import UsageError
from common.randomness import derive_seed

SIGNATURE = "load() -> (train, test, class_names)"
HALF = "each half is (uint8 images [n, channels, height, width], integer labels [n]) or a map-style data set of (image, label)"
STATISTICS_SAMPLES = 512  # of a map-style data set, for mean, standard deviation and fingerprint


class MapStyleImages(Dataset[Batch]):
    """One half: a map-style data set of ``(image, label)``, fetched sample by sample.

    Before each sample, Python's, numpy's and torch's default generators are seeded by (seed, epoch, sample). So random
    transforms neither depend on the number of workers nor on where a run was resumed.

    :param where: for an error's text, which half of which data set this is
    :param classes: labels are 0 to ``classes - 1``
    :raises BadSample: when the first sample is no image with its label
    """

    def __init__(self, samples: Any, where: str, classes: int, limit: int, seed: int = 0) -> None:
        self._samples, self._where, self._classes, self._limit, self._seed = samples, where, classes, limit, seed
        self.shape: Any = None  # channels, height and width of every image, when the first is known
        self.shape = self._fetch(0, 0)[0].shape

    def __len__(self) -> int:
        return self._limit

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """int64 ``[samples]``. This fetches every sample."""
        return np.array([self._fetch(0, sample)[1] for sample in range(len(self))], np.int64)

    def __getitems__(self, key: BatchKey) -> Batch:
        samples = [self._fetch(key.epoch, sample) for sample in key.samples.tolist()]
        images, labels = zip(*samples, strict=True)
        return Batch(torch.from_numpy(np.stack(images)), torch.tensor(labels))

    def _fetch(self, epoch: int, sample: int) -> tuple[npt.NDArray[np.uint8], int]:
        """One sample: uint8 ``[channels, height, width]`` and its label."""
        seed = derive_seed(self._seed, "own data set", epoch, sample)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        item = self._samples[sample]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise self._bad(sample, f"is {_outline(item)} and not a pair of an image and its label")
        image, label = _as_array(item[0]), np.asarray(item[1])
        if hasattr(item[0], "getbands"):  # a Pillow image, which has its channels last
            try:
                image = np.asarray(item[0] if item[0].mode in ("L", "RGB") else to_rgb(item[0]))
            except NoRange as error:
                raise self._bad(sample, f"is an image whose {error}") from error
            image = image.transpose(2, 0, 1) if image.ndim == 3 else image
        if image.ndim == 2:
            image = image[None]
        if image.ndim != 3 or image.dtype != np.uint8:
            raise self._bad(
                sample,
                f"has {_outline(image)} for an image: give a Pillow image, or uint8 [channels, height, width] of 0 to 255 (leave "
                "out ToTensor and Normalize)",
            )
        if self.shape not in (None, image.shape):
            raise self._bad(
                sample, f"has an image {list(image.shape)} and sample 0 one {list(self.shape)}: make them equal"
            )
        if label.ndim or not np.issubdtype(label.dtype, np.integer) or not 0 <= label < self._classes:
            raise self._bad(
                sample, f"has {item[1]!r} for a label, which is not an integer from 0 to {self._classes - 1}"
            )
        return image, int(label)

    def _bad(self, sample: int, problem: str) -> BadSample:
        return BadSample(f"{self._where}: sample {sample} {problem}")


def load_own(
    name: str,
    *,
    train_samples: int | None = None,
    test_samples: int | None = None,
    augmentation: Augmentation = NO_AUGMENTATION,
    seed: int = 0,
) -> ImageData:
    """Call the user's function and make an :class:`ImageData` of what it returns.

    Mean, standard deviation and fingerprint come from all pixels of arrays, and from :data:`STATISTICS_SAMPLES` evenly spaced
    samples of a map-style data set.

    :param name: ``module:function``
    :param train_samples: use only the first so many; all when None
    :param test_samples: likewise
    :param augmentation: of arrays
    :param seed: of the augmentation, and of the random transforms of map-style data sets
    :raises UsageError: when the function cannot be imported or called, or returns something else
    :raises RuntimeError: from the exception that the function raises, if it does
    """
    flag = f"--dataset {name}"
    load = import_function("--dataset", name, SIGNATURE)
    try:
        returned = load()
    except UsageError:
        raise
    except Exception as error:  # an OSError too keeps its traceback; DistEnv.fail_together would make it one line
        raise RuntimeError(f"{flag} failed: {type(error).__name__}: {error}") from error
    limits = {"train": train_samples, "test": test_samples}
    if isinstance(returned, ImageData):
        for split, limit in limits.items():
            if limit:
                raise UsageError(f"--{split}-samples {limit}: {flag} returns an ImageData, which is taken whole")
        return returned
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise UsageError(f"{flag} returned {_outline(returned)}: it must return (train, test, class_names); {HALF}")
    *splits, names = returned
    named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not named or len(names) < 2:
        raise UsageError(f"{flag} returned {names!r:.80} for class_names: it must be a list of two or more names")
    classes = tuple(names)

    train, test = (
        _half(half, f"{flag}, {split}", split, len(classes), limits[split], seed)
        for split, half in zip(limits, splits, strict=True)
    )
    if train.shape != test.shape:
        raise UsageError(f"{flag}: training images are {list(train.shape)} and test images {list(test.shape)}")
    pixels = [_pixels(half) for half in (train, test)]
    mean, std = mean_and_std(pixels[0][0])
    if isinstance(train, ImageDataset):  # what the shift uncovers becomes the mean grey
        train = ImageDataset(train.images, train.labels, replace(augmentation, fill=round(255 * mean)), seed)
    digest = hashlib.sha256("\n".join((*classes, str(len(train)), str(len(test)))).encode("utf-8", "surrogateescape"))
    for array in (*pixels[0], *pixels[1]):
        digest.update(np.ascontiguousarray(array).data)
    return ImageData(name, train, test, classes, mean, std or 1.0, digest.hexdigest()[:16])


def _half(half: Any, where: str, split: str, classes: int, limit: int | None, seed: int) -> Images:
    """One half as the trainer's loaders ask for it."""
    if isinstance(half, tuple | list) and len(half) == 2 and hasattr(half[0], "shape"):
        images, labels = map(_as_array, half)
        if images.ndim == 3:
            images = images[:, None]
        if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
            raise UsageError(
                f"{where}: {_outline(images)} and {_outline(labels)} are not uint8 images [n, channels, height, width] of 0 to "
                "255 and integer labels [n]"
            )
        if images.shape[1] > 4 >= images.shape[3]:
            raise UsageError(
                f"{where}: images {list(images.shape)} have their channels last: transpose(0, 3, 1, 2) first"
            )
        count = _count(len(images), where, split, limit)
        images, labels = images[:count], labels[:count]
        if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or labels.max() >= classes:
            raise UsageError(
                f"{where}: labels must be integers from 0 to {classes - 1}, one for each of the class_names"
            )
        return ImageDataset(images, labels.astype(np.int64))
    if not hasattr(half, "__getitem__") or not hasattr(half, "__len__"):
        raise UsageError(f"{where}: {_outline(half)} is no half of a data set: {HALF}")
    return MapStyleImages(half, where, classes, _count(len(half), where, split, limit), seed)


def _count(available: int, where: str, split: str, limit: int | None) -> int:
    if not available:
        raise UsageError(f"{where}: there are no samples")
    return first_samples(split, limit, available, where)


def _pixels(half: Images) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Images and labels for statistics and fingerprint. Evenly spaced, since the first may all be of one class."""
    if isinstance(half, ImageDataset):
        return half.images, half.labels
    count = min(len(half), STATISTICS_SAMPLES)
    batch = half.__getitems__(BatchKey(0, np.arange(count) * len(half) // count))
    return batch.images.numpy(), batch.labels.numpy()


def _as_array(value: Any) -> npt.NDArray[Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _outline(value: Any) -> str:
    """A value's type and shape, in a few words."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list) else f"a {kind}"
