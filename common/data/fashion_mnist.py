"""Fashion-MNIST (Xiao, Rasul and Vollgraf, arXiv 1708.07747), wherever it lies on the disk.

Four files in MNIST's IDX format. They may lie in torchvision's layout (``FashionMNIST/raw`` below the folder) or in the
folder itself, each as it is or gzipped: as torchvision, the authors' repository and Debian's ``dataset-fashion-mnist``
leave them.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from common.errors import UsageError

CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
SIDE = 28
SAMPLES = {"train": 60_000, "test": 10_000}
BACKGROUND = 0
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")

_PREFIXES = {"train": "train", "test": "t10k"}
# MNIST, KMNIST and others have files of the same names and shapes; these tell them apart.
_FIRST_LABELS = {"train": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], "test": [9, 2, 1, 1, 6, 1, 4, 6, 5, 7]}
_MEAN_GREY = 73.0  # of 255, in both splits; MNIST's is 33, KMNIST's 49


def default_folder() -> Path:
    """The folder without ``--data-dir``: ``data`` if it exists, else that of Debian's package if it is installed."""
    return DEBIAN_FOLDER if DEBIAN_FOLDER.is_dir() and not Path("data").is_dir() else Path("data")


def is_found() -> bool:
    """Whether the training images are in the default folder."""
    try:
        _find(default_folder(), f"{_PREFIXES['train']}-images-idx3-ubyte")
    except UsageError:
        return False
    return True


def download(folder: Path) -> None:
    """Download with torchvision, into its layout, unless the files exist. One process per node calls it; the others wait.

    :raises UsageError: when no mirror answers or the folder cannot be written
    """
    from torchvision.datasets import FashionMNIST

    try:
        FashionMNIST(os.fspath(folder), download=True)
    except Exception as error:  # torchvision raises many kinds, for a mirror's answer or an incomplete file
        raise UsageError(f"--download to {folder} failed: {' '.join(str(error).split())}") from error


def read(folder: Path | None, split: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one split.

    :param split: ``"train"`` or ``"test"``
    :returns: images uint8 ``[n, 28, 28]`` and labels int64 ``[n]``, n of :data:`SAMPLES`
    :raises UsageError: naming the file that is missing, damaged or not Fashion-MNIST's
    """
    folder, prefix, count = folder or default_folder(), _PREFIXES[split], SAMPLES[split]
    images_path = _find(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(folder, f"{prefix}-labels-idx1-ubyte")
    images = _read_idx(images_path, (count, SIDE, SIDE))
    labels = _read_idx(labels_path, (count,))
    if abs(images.mean() - _MEAN_GREY) > 1:
        raise UsageError(f"{images_path} holds other images than Fashion-MNIST's (MNIST's have the same file names)")
    if labels[:10].tolist() != _FIRST_LABELS[split]:
        raise UsageError(f"{labels_path} holds other labels than Fashion-MNIST's (MNIST's have the same file names)")
    return images, labels.astype(np.int64)


def _read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """One file's array. An IDX file is a magic number (of the type, 8 for uint8, and the dimensions), the shape, and the bytes."""
    header = struct.pack(f">{1 + len(shape)}I", 0x800 + len(shape), *shape)
    content = b""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error):  # which one depends on where in the file the damage is
        pass
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not content.startswith(header) or len(content) != len(header) + math.prod(shape):
        raise UsageError(f"{path} is damaged or truncated, not uint8 {list(shape)}: delete it and fetch it again")
    return np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape).copy()


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / "FashionMNIST" / "raw" / name, folder / name):
        for path in (candidate, candidate.with_name(name + ".gz")):
            if path.is_file():
                return path
    raise UsageError(
        f"no {name}[.gz] in {folder} or {folder}/FashionMNIST/raw: point --data-dir at it, or add --download "
        "(Debian: apt-get install dataset-fashion-mnist)"
    )
