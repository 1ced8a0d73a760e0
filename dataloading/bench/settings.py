"""A setting of the benchmark, and the loader that it stands for."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dataloading.dataset.augmentation import course_transform
from dataloading.dataset.batches import ImageBatches, ThreadedFetch, collate
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.latency import DelayedStorage
from dataloading.dataset.sampler import ShuffledBatches, ShuffledSampler
from dataloading.dataset.storage import LocalFolder, Storage
from dataloading.loader.fast_loader import FastLoader
from dataloading.loader.stock_loader import FLOAT_BYTES, stock_loader

LOADERS = ("stock", "fast")


@dataclass(frozen=True)
class Setting:
    """The choices of a user.

    :param loader: ``stock``: ``DataLoader`` over images that become float tensors one by one and are collated, as courses
        teach it; ``fast``: ``FastLoader``
    :param workers: processes of ``stock``, threads of ``fast``; 0 loads in the main process
    :param fetch_threads: threads inside each worker that fetch a batch's files in parallel
    :param latency_ms: median delay added to each file; 0 for none
    """

    loader: str = "stock"
    workers: int = 0
    batch_size: int = 32
    prefetch_factor: int = 2
    persistent_workers: bool = False
    augmentation: str = "none"
    decoder: str = "pillow"
    latency_ms: float = 0.0
    fetch_threads: int = 1

    def canonical(self) -> Setting:
        """The same with meaningless fields at their defaults, so that equivalent settings are equal."""
        meaningless = self.meaningless()
        defaults: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(self) if f.name in meaningless}
        return dataclasses.replace(self, **defaults)

    def meaningless(self) -> set[str]:
        """The fields that have no effect in this setting."""
        names: set[str] = set()
        if self.workers == 0:
            names |= {"prefetch_factor", "persistent_workers"}
        if self.loader != "stock":
            # Threads take no time to start, and the main process fetches file after file.
            names.add("persistent_workers" if self.workers else "fetch_threads")
        return names

    def label(self, axes: Iterable[str]) -> str:
        """Its values of these fields, in words."""
        meaningful = [axis for axis in axes if axis not in self.meaningless()]
        return ", ".join(_phrase(axis, getattr(self, axis)) for axis in meaningful) or "this setting"


def varying(settings: list[Setting]) -> list[str]:
    """The axes along which the settings differ."""
    names = [field.name for field in dataclasses.fields(Setting)]
    return [name for name in names if len({getattr(setting, name) for setting in settings}) > 1]


def _phrase(axis: str, value: Any) -> str:
    if axis == "workers":
        return "1 worker" if value == 1 else f"{value} workers"
    if axis == "loader":
        return str(value)
    name = axis.replace("_", "-")
    return name if value is True else f"{name} {value}"


class Library:
    """Data sets and loaders over one folder, for each way to read it; the folder is listed once.

    :param root: a folder; delays are added in this process before its files are read
    :param image_size: see :class:`ImageFiles`
    """

    def __init__(self, root: str, image_size: int | None = None) -> None:
        self._storage, self.image_size = Listed(LocalFolder(root)), image_size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def dataset(self, setting: Setting) -> ImageFiles:
        """The files as the setting reads them; for ``DataLoader`` with the course's ``ToTensor``."""
        latency = setting.latency_ms
        return ImageFiles(
            DelayedStorage(self._storage, latency) if latency else self._storage,
            transform=course_transform("none") if setting.loader == "stock" else None,
            decoder=setting.decoder,
            augmentation=setting.augmentation,
            image_size=self.image_size,
        )

    def loader(self, setting: Setting, batches: int) -> Iterable[Any]:
        """A loader of this many batches, which repeats the files if there are too few.

        It iterates over ``(images, labels)``; those for a GPU are pinned, or copied there by ``FastLoader``. Its workers end
        with the iterator, persistent ones with the loader.
        """
        dataset = self.dataset(setting)
        sampler = ShuffledSampler(len(dataset), length=batches * setting.batch_size)
        if setting.loader == "stock":
            fetched = ThreadedFetch(dataset, setting.fetch_threads) if setting.fetch_threads > 1 else dataset
            for_workers: dict[str, Any] = {}
            if setting.workers:
                for_workers = {
                    "prefetch_factor": setting.prefetch_factor,
                    "persistent_workers": setting.persistent_workers,
                }
            return stock_loader(
                fetched,
                setting.workers,
                batch_bytes=setting.batch_size * FLOAT_BYTES * math.prod(dataset.image_shape()),
                batch_size=setting.batch_size,
                sampler=sampler,
                collate_fn=collate,
                pin_memory=self.device.type == "cuda",
                **for_workers,
            )
        return FastLoader(
            ImageBatches(dataset),
            batch_sampler=ShuffledBatches(sampler, setting.batch_size),
            num_workers=setting.workers * setting.fetch_threads,
            prefetch_batches=max(2, setting.prefetch_factor * setting.workers),
            device=self.device,
        )


class Listed:
    """A storage that is listed once.

    :param most: a random sample of so many of its files, the same each time; all when None
    """

    def __init__(self, storage: Storage, most: int | None = None) -> None:
        self.root, self.read = storage.root, storage.read
        names = sorted(storage.names())
        self._names = random.Random(0).sample(names, min(len(names), most or len(names)))

    def names(self) -> list[str]:
        return self._names
