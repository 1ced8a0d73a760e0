"""Folders of images as classification tasks: the person in a photo, or the class of an image.

    torchrun --nproc_per_node=2 -m ddp.train --dataset lfw
    torchrun --nproc_per_node=2 -m ddp.train --dataset folder --data-dir photos

The classes of a folder of faces are the people with enough images. A fifth of each class is for testing. The file names alone
decide which, so the split is the same on every machine and does not change when other classes are added.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from common.data.datasets import NO_AUGMENTATION, Augmentation, BatchKey, ImageData, first_samples, mean_and_std
from common.errors import UsageError
from common.randomness import hash64
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.image_folder import LAYOUT, ImageFolder
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.storage import UniquePaths
from dataloading.synthetic import face_cache

TEST_SHARE = 5  # one in five images of a class is for testing, at least one
STATISTICS_SAMPLES = 512
STATISTICS_THREADS = 8  # more than cores, for files on storage with high latency
CHUNK = 8  # images that a thread takes at a time

Indices = npt.NDArray[np.int64]


def load_lfw(
    folder: str | None = None,
    *,
    min_images_per_person: int = 40,
    image_size: int = 64,
    augmentation: Augmentation = NO_AUGMENTATION,
    seed: int = 0,
    train_samples: int | None = None,
    test_samples: int | None = None,
    decoder: str = "pillow",
) -> ImageData:
    """The people of a folder as classes, in the order of their names. Files are read when a batch needs them.

    :param folder: in LFW's layout; the drawn faces when None (see :mod:`dataloading.synthetic.face_cache`)
    :param min_images_per_person: people with fewer are left out; at least 2, for a training and a test image
    :param image_size: height and width to which images are resized, in pixels
    :param augmentation: of a training batch; uncovered borders get the training images' mean grey
    :param seed: of the augmentation; the data itself is the same for every seed
    :param train_samples: take only the first so many, in an order that mixes the people; all when None
    :param test_samples: the same for the test images
    :param decoder: one of :data:`common.data.DECODERS`
    :returns: mean, standard deviation and fingerprint (beside names and labels) are those of the first
        :data:`STATISTICS_SAMPLES` training images
    :raises UsageError: when there is no such folder, it holds fewer than two people with so many images, or too few
        samples, or one of those first images is damaged
    """
    files = LFWDataset(folder or face_cache.ensure(), decoder=decoder, seed=seed, image_size=image_size)
    people = _people(files, min_images_per_person)
    train, test = (files.subset(indices, people) for indices in split(files, people))
    return image_data("lfw", train, test, augmentation, train_samples, test_samples)


def load_folder(
    folder: str,
    *,
    image_size: int = 64,
    augmentation: Augmentation = NO_AUGMENTATION,
    seed: int = 0,
    train_samples: int | None = None,
    test_samples: int | None = None,
) -> ImageData:
    """The classes of a folder; their images stay files until a batch needs them.

    :param folder: ``<folder>/<class>/<image>``, where a fifth of each class is for testing; or ``<folder>/train/<class>/<image>``
        and ``<folder>/test/<class>/<image>``
    :param image_size: height and width of the images, which are resized
    :param augmentation: of a training batch; what it uncovers becomes the training images' mean grey
    :param seed: of the augmentation; the data itself is the same for every seed
    :param train_samples: use only so many, the first in an order that mixes the classes; all when None
    :param test_samples: likewise
    :raises UsageError: for a folder of another layout, an empty class, too few samples, or a damaged image among the first
    """
    if not os.path.isdir(folder):
        raise UsageError(
            f"--data-dir {folder} is {'a file' if os.path.exists(folder) else 'not there'}: give a folder, {LAYOUT}"
        )
    folders = [os.path.join(folder, part) for part in ("train", "test")]
    if all(map(os.path.isdir, folders)):
        listed = UniquePaths()
        train, test = (_mixed(ImageFolder(part, image_size=image_size, seed=seed, listed=listed)) for part in folders)
        if train.classes != test.classes:
            one = min(set(train.classes) ^ set(test.classes))
            there, missing = folders if one in train.classes else reversed(folders)
            raise UsageError(f"{there} has a class {one} and {missing} has none: both need the same classes")
    elif any(map(os.path.isdir, folders)):
        there, missing = sorted(folders, key=os.path.isdir, reverse=True)
        raise UsageError(f"{there} is there and {missing} is not: both are needed, or another name if it is a class")
    else:
        files = ImageFolder(folder, image_size=image_size, seed=seed)
        single = np.flatnonzero(np.bincount(files.labels) < 2)
        if len(single):
            raise UsageError(
                f"{os.path.join(folder, files.classes[single[0]])} holds one image and needs two, for training and for testing"
            )
        train, test = map(files.subset, split(files, np.arange(len(files.classes))))
    return image_data("folder", train, test, augmentation, train_samples, test_samples)


def _mixed(files: ImageFiles) -> ImageFiles:
    """The same files in an order that mixes the classes, and depends on nothing but their names."""
    train, test = split(files, np.arange(len(files.classes)))
    return files.subset(np.concatenate([test, train]))


def image_data(
    name: str,
    train: ImageFiles,
    test: ImageFiles,
    augmentation: Augmentation,
    train_samples: int | None,
    test_samples: int | None,
) -> ImageData:
    """The first samples of two sets of the same classes as a data set to train on, with the statistics of the first training images.

    :raises UsageError: when there are fewer samples
    :raises BadFile: when one of the first training images is damaged
    """
    train = train.subset(np.arange(first_samples("train", train_samples, len(train), name)))
    test = test.subset(np.arange(first_samples("test", test_samples, len(test), name)))
    pixels = _first_images(train)
    mean, std = mean_and_std(pixels)
    checksum = hashlib.sha256(pixels.tobytes())
    for part in (train, test):
        checksum.update("\n".join(part.files).encode("utf-8", "surrogateescape"))
        checksum.update(part.labels.tobytes())
    return ImageData(
        name=name,
        train=ImageBatches(train, replace(augmentation, fill=round(255 * mean))),
        test=ImageBatches(test),
        classes=train.classes,
        mean=mean,
        std=std,
        fingerprint=checksum.hexdigest()[:16],
    )


def _people(files: ImageFiles, min_images: int) -> Indices:
    """The people with enough images, as ascending indices into ``files.classes``."""
    images = np.bincount(files.labels)
    people = np.flatnonzero(images >= min_images)
    if len(people) < 2:
        most = " and ".join(map(str, np.sort(images)[:-3:-1]))
        raise UsageError(
            f"--min-images-per-person {min_images}: in {files.storage.root}, {len(people)} of {len(images)} people have so "
            f"many, and two are needed; the most images are {most}: lower it, or give another --data-dir"
        )
    return people


def split(files: ImageFiles, people: Indices) -> tuple[Indices, Indices]:
    """Indices of the training and of the test images, each in the order of a hash of the file's name."""
    names = np.array([zlib.crc32(name.encode("utf-8", "surrogateescape")) for name in files.files])
    order = np.argsort(hash64("lfw-split", names), kind="stable")
    tested = np.zeros(len(files), bool)
    for person in people:
        own = order[files.labels[order] == person]
        tested[own[: max(1, len(own) // TEST_SHARE)]] = True
    chosen = np.isin(files.labels, people)
    return order[(chosen & ~tested)[order]], order[tested[order]]


def _first_images(train: ImageFiles) -> npt.NDArray[np.uint8]:
    """uint8 ``[n, 3, height, width]``, decoded by threads."""
    key, batches = BatchKey(0, np.arange(min(len(train), STATISTICS_SAMPLES))), ImageBatches(train)
    pixels = np.empty((len(key.samples), *batches.image_shape), np.uint8)
    with ThreadPoolExecutor(STATISTICS_THREADS) as threads:
        list(threads.map(lambda at: batches.fill(pixels, key, at, at + CHUNK), range(0, len(pixels), CHUNK)))
    return pixels.transpose(0, 3, 1, 2)
