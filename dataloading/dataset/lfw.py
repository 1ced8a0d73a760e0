"""A folder of JPEG files in the layout of Labeled Faces in the Wild. Each file is opened and decoded on request.

``<root>/<Person_Name>/<Person_Name>_<NNNN>.jpg``, or files directly in the folder. Only the list of names is held in memory,
so the set may be of any size.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from common.errors import UsageError
from dataloading.dataset.augmentation import Draws, ImageAugmentation
from dataloading.dataset.decoders import NotDecodable, Pixels, get_decoder, open_pillow
from dataloading.dataset.file_list import FileList
from dataloading.dataset.sampler import SampleKey
from dataloading.dataset.storage import BadFile, Storage, Unskippable, open_storage

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

ON_ERROR: tuple[str, ...] = ("raise", "skip")
SKIP_LIMIT = 100  # files that may be skipped, over all workers and epochs
StageTimer = Callable[[str], AbstractContextManager[Any]]


class Skipped:
    """Stands for a sample that could not be read; ``collate`` leaves it out of the batch."""


class LFWDataset(Dataset[Any]):
    """Images from files: ``(image, person)`` pairs, the person as an index into :attr:`people`.

    :param root: a folder, or a URL: ``file://``, ``http://``, or any protocol that fsspec has a plugin for
    :param transform: called with each Pillow image (RGB); None returns the image itself
    :param decoder: one of :data:`common.data.DECODERS`
    :param augmentation: applied before ``transform``; a pure function of (``seed``, epoch, sample)
    :param seed: of the augmentation, and of the fast loader's shuffling
    :param image_size: resize every image to a square of this many pixels; None keeps the size
    :param on_error: ``"raise"``, or ``"skip"``: return :class:`Skipped` for a file that cannot be read or decoded, and warn
        with its name, up to :data:`SKIP_LIMIT`; :func:`dataloading.dataset.batches.collate` leaves it out
    :raises UsageError: when there is no such folder, or no JPEG in it
    :raises ValueError: for arguments out of their range
    """

    def __init__(
        self,
        root: str | Path | Storage,
        transform: Callable[[Image.Image], Any] | None = None,
        *,
        decoder: str = "pillow",
        augmentation: str = "none",
        seed: int = 0,
        image_size: int | None = None,
        on_error: str = "raise",
    ) -> None:
        if on_error not in ON_ERROR:
            raise ValueError(f"on_error (--on-error) is {on_error!r}: it must be {' or '.join(ON_ERROR)}")
        if image_size is not None and image_size < 1:
            raise ValueError(f"image_size (--image-size) is {image_size}: it must be at least 1")
        self.storage = open_storage(root) if isinstance(root, str | Path) else root
        self.transform, self.decoder = transform, decoder
        self.augmentation, self.seed = ImageAugmentation(augmentation), seed
        self.image_size = image_size
        # It times nothing; dataloading.bench.stages puts a timer of each stage here.
        self.span: StageTimer = contextlib.nullcontext
        self._decode = get_decoder(decoder)  # a missing decoder fails here, not in a worker

        names = sorted(self.storage.names())
        if not names:
            raise UsageError(
                f"{self.storage.root} holds no JPEG file, nor do the folders in it: "
                "a data set is <folder>/<Person_Name>/<Person_Name>_<NNNN>.jpg, or <folder>/<name>.jpg"
            )
        # The person of a file outside any folder is its name up to the number.
        folders = [name.split("/")[0] if "/" in name else name.rsplit(".", 1)[0].rsplit("_", 1)[0] for name in names]
        people, labels = np.unique(np.array(folders), return_inverse=True)
        self.formats: tuple[str, ...] | None = ("JPEG",)  # of Pillow
        self.files = FileList(names)
        self.people: tuple[str, ...] = tuple(people.tolist())
        self.labels: npt.NDArray[np.int64] = labels.astype(np.int64)
        # One mark per file counts each file once; shared memory lets each worker see the total.
        self._skipped = torch.zeros(len(names), dtype=torch.uint8).share_memory_() if on_error == "skip" else None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int | SampleKey) -> Any:
        """One sample, in this epoch (0 for a plain index).

        :raises BadFile: with the file's name, when it cannot be read or decoded
        """
        epoch, sample = key if isinstance(key, SampleKey) else (0, int(key))
        draws = self.augmentation.draw(self.seed, epoch, np.array([sample]))[0] if self.augmentation else None
        try:
            image = self.image(sample, draws)
        except BadFile as error:
            self.skip_or_raise(sample, error)
            return Skipped()
        with self.span("transform"):
            result = image if self.transform is None else self.transform(image)
        return result, int(self.labels[sample])

    def subset(self, samples: npt.NDArray[np.int64], people: npt.NDArray[np.int64] | None = None) -> LFWDataset:
        """A data set of some of the files, in the order of ``samples``, with the same settings.

        :param samples: int64 indices of files
        :param people: the classes, which include the people of these files, as ascending int64 indices into :attr:`people`;
            their labels count from 0. Everyone when None
        """
        part = copy.copy(self)
        part.files, part.labels = self.files.subset(samples), self.labels[samples]
        if people is not None:
            part.people = tuple(self.people[person] for person in people.tolist())
            part.labels = np.searchsorted(people, part.labels).astype(np.int64)
        if self._skipped is not None:
            part._skipped = torch.zeros(len(samples), dtype=torch.uint8).share_memory_()
        return part

    def path(self, sample: int) -> str:
        """The path or URL of a sample's file."""
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
            raise Unskippable(
                f"{self.path(sample)} has {width}x{height} pixels, where the first image has {out.shape[1]}x{out.shape[0]}: "
                "images of several sizes make no batch; give image_size (--image-size)"
            )

    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image: from ``image_size``, or from the first readable file."""
        if self.image_size is not None:
            return self.image_size, self.image_size, 3
        for sample in range(len(self)):
            try:
                width, height = self._decoded(sample).size
                return height, width, 3
            except BadFile:  # it is counted when a batch needs it
                if self._skipped is None:
                    raise
        raise UsageError(f"{self.storage.root}: none of its {len(self)} files can be decoded")

    @property
    def skipped(self) -> int:
        """Number of files skipped so far, by all workers."""
        return 0 if self._skipped is None else int(self._skipped.count_nonzero())

    def skip_or_raise(self, sample: int, error: BadFile) -> None:
        """Mark a file as skipped, and warn the first time.

        :raises BadFile: the error itself without ``on_error="skip"``, or when more than :data:`SKIP_LIMIT` files were skipped
        """
        if self._skipped is None or isinstance(error, Unskippable):
            raise error
        if self._skipped[sample]:
            return
        self._skipped[sample] = 1
        if self.skipped > SKIP_LIMIT:
            raise Unskippable(f"{error}; more than {SKIP_LIMIT} files could not be read, so this is not skipped")
        logger.warning("skipped: %s", error)

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
