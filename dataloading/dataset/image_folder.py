"""A folder of classes as something to learn: any images that Pillow reads, resized to one size.

    torchrun --nproc_per_node=2 -m ddp.train --dataset folder --data-dir photos

``photos/<class>/<image>``, where a fifth of each class is for testing, chosen by a hash of the files' names; or ``photos/train/
<class>/<image>`` and ``photos/test/<class>/<image>``. Folders within a class belong to it. Names that begin with a dot are left
out, and so are files with an extension that Pillow does not know.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import numpy as np

from common.data.datasets import NO_AUGMENTATION, Augmentation, ImageData, first_samples
from common.errors import UsageError
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.storage import LocalFolder
from dataloading.dataset.training_data import image_data, split

NAME = "folder"
LAYOUT = "DIR/CLASS/IMAGE, or DIR/train/CLASS/IMAGE and DIR/test/CLASS/IMAGE"


class ImageFolder(LFWDataset):
    """The images of a folder with a folder per class; ``people`` are the classes, in the order of their names.

    :param root: a local folder
    :param image_size: height and width to which the images are resized
    :param seed: of the fast loader's shuffling
    :raises UsageError: when there is no such folder, it has fewer than two classes, or a class has no image
    """

    def __init__(self, root: str | Path, *, image_size: int = 64, seed: int = 0) -> None:
        super().__init__(_FolderOfClasses(os.fspath(root)), image_size=image_size, seed=seed)
        self.formats = None


class _FolderOfClasses(LocalFolder):
    """Lists the images of every class."""

    def names(self) -> list[str]:
        try:
            entries = list(os.scandir(self.root))
        except OSError as error:
            _raise(error)
        classes = sorted(entry.name for entry in entries if entry.is_dir() and _is_seen(entry.name))
        if len(classes) < 2:
            raise UsageError(
                f"{self.root} has {len(classes) or 'no'} folder{'s' * (len(classes) != 1)} of images and two classes are needed: "
                f"the layout is {LAYOUT}"
            )
        extensions = _readable_extensions()
        return [name for one in classes for name in self._images(one, extensions)]

    def _images(self, one: str, extensions: set[str]) -> list[str]:
        """The images of one class, relative to the root."""
        images: list[str] = []
        for folder, subfolders, files in os.walk(os.path.join(self.root, one), onerror=_raise, followlinks=True):
            subfolders[:] = filter(_is_seen, subfolders)
            chosen = (file for file in files if _is_seen(file) and os.path.splitext(file)[1].lower() in extensions)
            images += [os.path.relpath(os.path.join(folder, file), self.root) for file in chosen]
        if not images:
            raise UsageError(
                f"{os.path.join(self.root, one)} holds no image that Pillow reads: add some, or remove the folder"
            )
        return images


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

    :param folder: with the layout above
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
        train, test = (_mixed(ImageFolder(part, image_size=image_size, seed=seed)) for part in folders)
        if train.people != test.people:
            one = min(set(train.people) ^ set(test.people))
            there, missing = folders if one in train.people else reversed(folders)
            raise UsageError(f"{there} has a class {one} and {missing} has none: both need the same classes")
    elif any(map(os.path.isdir, folders)):
        there, missing = sorted(folders, key=os.path.isdir, reverse=True)
        raise UsageError(f"{there} is there and {missing} is not: both are needed, or another name if it is a class")
    else:
        files = ImageFolder(folder, image_size=image_size, seed=seed)
        single = np.flatnonzero(np.bincount(files.labels) < 2)
        if len(single):
            raise UsageError(
                f"{os.path.join(folder, files.people[single[0]])} holds one image and needs two, for training and for testing"
            )
        train, test = map(files.subset, split(files, np.arange(len(files.people))))
    train = train.subset(np.arange(first_samples("train", train_samples, len(train), NAME)))
    test = test.subset(np.arange(first_samples("test", test_samples, len(test), NAME)))
    return image_data(NAME, train, test, augmentation)


def _mixed(files: LFWDataset) -> LFWDataset:
    """The same files in an order that mixes the classes, and depends on nothing but their names."""
    train, test = split(files, np.arange(len(files.people)))
    return files.subset(np.concatenate([test, train]))


def _readable_extensions() -> set[str]:
    """With their dots, in lower case."""
    from PIL import Image

    known = Image.registered_extensions()  # which imports Pillow's plugins
    return {extension for extension, image_format in known.items() if image_format in Image.OPEN}


def _is_seen(name: str) -> bool:
    return not name.startswith(".")


def _raise(error: OSError) -> NoReturn:
    raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from error
