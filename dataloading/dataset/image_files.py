"""Image files as a data set. Each file is opened and decoded on request, so the set may be of any size: only names are in memory.

A file's class is the folder in which it lies. :mod:`dataloading.dataset.lfw` and :mod:`dataloading.dataset.image_folder` are two ways
to list files.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from common.errors import UsageError
from dataloading.dataset.augmentation import Draws, ImageAugmentation
from dataloading.dataset.decoders import NotDecodable, Pixels, get_decoder, open_pillow
from dataloading.dataset.file_list import FileList
from dataloading.dataset.sampler import SampleKey, random_epoch
from dataloading.dataset.storage import BadFile, LocalFolder, Storage

if TYPE_CHECKING:
    from PIL import Image

StageTimer = Callable[[str], AbstractContextManager[Any]]


class ImageFiles(Dataset[Any]):
    """Images from files: ``(image, label)`` pairs, the label as an index into :attr:`classes`.

    :param root: a folder, or a storage that reads one
    :param transform: called with each Pillow image (RGB); None returns the image itself
    :param decoder: one of :data:`common.data.DECODERS`
    :param augmentation: applied before ``transform``; a pure function of (``seed``, epoch, sample)
    :param seed: of the augmentation, and of the fast loader's shuffling
    :param image_size: resize every image to a square of this many pixels; None keeps the size
    :raises UsageError: when there is no such folder, or no image in it
    :raises ValueError: for arguments out of their range
    """

    formats: tuple[str, ...] | None = ("JPEG",)  # Pillow's; None: all that it reads
    layout = "<folder>/<class>/<name>.jpg"

    def __init__(
        self,
        root: str | Path | Storage,
        transform: Callable[[Image.Image], Any] | None = None,
        *,
        decoder: str = "pillow",
        augmentation: str = "none",
        seed: int = 0,
        image_size: int | None = None,
    ) -> None:
        if image_size is not None and image_size < 1:
            raise ValueError(f"image_size (--image-size) is {image_size}: it must be at least 1")
        self.storage = LocalFolder(os.fspath(root)) if isinstance(root, str | Path) else root
        self.transform, self.decoder = transform, decoder
        self.augmentation, self.seed = ImageAugmentation(augmentation), seed
        self.image_size = image_size
        self.span: StageTimer = contextlib.nullcontext  # around each stage; dataloading/bench/stages.py takes the time
        self._decode = get_decoder(decoder)  # a missing decoder fails here, not in a worker

        names = sorted(self.storage.names())
        if not names:
            raise UsageError(
                f"{self.storage.root} holds no JPEG file, nor do the folders in it: a data set is {self.layout}"
            )
        classes, labels = np.unique(np.array([self.class_of(name) for name in names]), return_inverse=True)
        self.files = FileList(names)
        self.classes: tuple[str, ...] = tuple(classes.tolist())
        self.labels: npt.NDArray[np.int64] = labels.astype(np.int64)

    def class_of(self, name: str) -> str:
        """The class of a file: its first folder."""
        return name.split("/")[0]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int | SampleKey) -> Any:
        """One sample, augmented as in this epoch (in a random one for a plain index).

        :raises BadFile: with the file's name, when it cannot be read or decoded
        """
        epoch, sample = key if isinstance(key, SampleKey) else (None, int(key))
        draws = None
        if self.augmentation:
            epoch = random_epoch() if epoch is None else epoch
            draws = self.augmentation.draw(self.seed, epoch, np.array([sample]))[0]
        image = self.image(sample, draws)
        with self.span("transform"):
            result = image if self.transform is None else self.transform(image)
        return result, int(self.labels[sample])

    def subset(self, samples: npt.NDArray[np.int64], classes: npt.NDArray[np.int64] | None = None) -> ImageFiles:
        """A data set of some of the files, in the order of ``samples``, with the same settings.

        :param samples: int64 indices of files
        :param classes: those of these files and perhaps others, as ascending int64 indices into :attr:`classes`; the labels then
            count from 0. All classes when None
        """
        part = copy.copy(self)
        part.files, part.labels = self.files.subset(samples), self.labels[samples]
        if classes is not None:
            part.classes = tuple(self.classes[label] for label in classes.tolist())
            part.labels = np.searchsorted(classes, part.labels).astype(np.int64)
        return part

    def path(self, sample: int) -> str:
        """The path of a sample's file."""
        return f"{self.storage.root.rstrip('/')}/{self.files[sample]}"

    def read(self, sample: int) -> bytes:
        """The content of a sample's file.

        :raises BadFile: when it cannot be read
        """
        with self.span("read"):
            return self.storage.read(self.files[sample])

    def image(self, sample: int, draws: Draws | None = None) -> Image.Image:
        """A sample as a Pillow image in RGB: decoded, resized, augmented.

        :param draws: the sample's row of ``augmentation.draw``; None without an augmentation
        :raises BadFile: when it cannot be read or decoded
        """
        from PIL import Image

        image = self._decoded(sample)
        if self.image_size is not None and image.size != (self.image_size, self.image_size):
            with self.span("resize"):
                image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR, reducing_gap=2.0)
        if self.augmentation and draws is not None:
            with self.span("augment"):
                image = self.augmentation(image, draws)
        return image

    def pixels_into(self, out: Pixels, sample: int, draws: Draws | None = None) -> None:
        """Write a sample's pixels into the batch's memory, decoding there directly where possible.

        :param out: uint8 ``[height, width, 3]``, C-contiguous
        :param draws: the sample's row of ``augmentation.draw``; None without an augmentation
        :raises BadFile: when it cannot be read or decoded, or has another size
        """
        if self.augmentation or self.image_size is not None:
            pixels = np.asarray(self.image(sample, draws))
            if pixels.shape == out.shape:
                out[:] = pixels
        else:
            data = self.read(sample)
            try:
                with self.span("decode"):
                    pixels = self._decode(data, out)
            except NotDecodable as error:
                raise self._bad(sample, error) from error
        if pixels.shape != out.shape:
            height, width = pixels.shape[:2]
            raise BadFile(
                f"{self.path(sample)} has {width}x{height} pixels, where the first image has {out.shape[1]}x{out.shape[0]}: "
                "images of several sizes make no batch; give image_size (--image-size)"
            )

    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image: from ``image_size``, or from the first file."""
        if self.image_size is not None:
            return self.image_size, self.image_size, 3
        width, height = self._decoded(0).size
        return height, width, 3

    def _decoded(self, sample: int) -> Image.Image:
        from PIL import Image

        data = self.read(sample)
        try:
            with self.span("decode"):
                if self.decoder == "pillow":
                    return open_pillow(data, self.formats)
                return Image.fromarray(self._decode(data, None))
        except NotDecodable as error:
            raise self._bad(sample, error) from error

    def _bad(self, sample: int, error: NotDecodable) -> BadFile:
        return BadFile(f"{self.path(sample)} is {error}; fetch it again, or remove it")
