"""Tools of the tests of data loading: pictures, every loader by name, damaged files, and a look at what is left behind.

    python -m tests.dataloading.faults LOADER FOLDER

goes over the folder with a loader of :data:`LOADERS`, slowly and without end, for a test that interrupts or kills it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from common.data.datasets import keep_batch
from common.data.loaders import start_worker
from dataloading.dataset.batches import ImageBatches, ThreadedFetch, collate
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.latency import DelayedStorage
from dataloading.dataset.sampler import ShuffledBatches, ShuffledSampler
from dataloading.dataset.storage import BadFile, LocalFolder
from dataloading.loader.fast_loader import FastLoader
from tests.support.harm.disk import a_folder, empty

WIDTH, HEIGHT = 24, 20
BATCH_SIZE = 4


def save_picture(
    path: Path | io.BytesIO,
    seed: int | list[int],
    *,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    mode: str = "RGB",
    **settings: Any,
) -> None:
    """A JPEG of soft colours, another for each seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, {"L": 1, "RGB": 3, "CMYK": 4}[mode]), np.uint8)
    channels = [
        Image.fromarray(channel).resize(size, Image.Resampling.BICUBIC) for channel in coarse.transpose(2, 0, 1)
    ]
    Image.merge(mode, channels).save(path, "JPEG", **settings)


def write_people(folder: Path, people: Mapping[str, int], size: tuple[int, int] = (WIDTH, HEIGHT)) -> Path:
    """So many pictures of each person, in LFW's layout; a picture's content follows from its name."""
    for person, count in people.items():
        (folder / person).mkdir(parents=True)
        for number in range(1, count + 1):
            name = f"{person}_{number:04d}"
            save_picture(folder / person / f"{name}.jpg", list(name.encode()), size=size)
    return folder


# Every way to load a folder: each yields the same (images uint8 [n, 3, height, width], labels) in the same order.

# The fork server has one thread. The tests' own process has those of earlier tests. A child of its fork may wait for ever for a
# lock that one of these held (gh-112275 in the Pythons of ddp/rendezvous/fork_safety.py is one way): once, a worker did.
CONTEXT: str | None = "forkserver"


def to_tensor(image: Image.Image) -> Tensor:
    """uint8 ``[3, height, width]``. A worker of the fork server would import torchvision anew for its ``PILToTensor``."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def stock(files: ImageFiles, epoch: int, batch_size: int, workers: int = 0, threads: int = 0) -> Iterator[Any]:
    """``DataLoader``, which fetches one sample after the other, or a batch's samples in threads."""
    files.transform = to_tensor
    sampler = ShuffledSampler(len(files), seed=files.seed)
    sampler.set_epoch(epoch)
    return iter(
        DataLoader(
            ThreadedFetch(files, threads) if threads else files,
            batch_size,
            sampler=sampler,
            num_workers=workers,
            collate_fn=collate,
            worker_init_fn=start_worker,
            multiprocessing_context=CONTEXT if workers else None,
        )
    )


def whole_batches(files: ImageFiles, epoch: int, batch_size: int, workers: int = 0) -> Iterator[Any]:
    """``DataLoader`` over a data set that fills whole batches."""
    sampler = ShuffledBatches(ShuffledSampler(len(files), seed=files.seed), batch_size)
    sampler.set_epoch(epoch)
    collate_fn: Any = keep_batch
    return iter(
        DataLoader(
            ImageBatches(files),
            batch_sampler=sampler,  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=collate_fn,
            worker_init_fn=start_worker,
            multiprocessing_context=CONTEXT if workers else None,
        )
    )


def fast(files: ImageFiles, epoch: int, batch_size: int, workers: int = 0) -> Iterator[Any]:
    """The fast loader."""
    loader = FastLoader(ImageBatches(files), batch_size, shuffle=True, num_workers=workers)
    loader.set_epoch(epoch)
    return iter(loader)


Load = Callable[[ImageFiles, int, int], Iterator[Any]]

LOADERS: dict[str, Load] = {
    "stock": stock,
    "stock-2": functools.partial(stock, workers=2),
    "stock-threaded-fetch": functools.partial(stock, threads=3),
    "stock-2-threaded-fetch": functools.partial(stock, workers=2, threads=3),
    "whole-batches": whole_batches,
    "whole-batches-2": functools.partial(whole_batches, workers=2),
    "fast": fast,
    "fast-1-thread": functools.partial(fast, workers=1),
    "fast-3-threads": functools.partial(fast, workers=3),
}


def load(
    loader: str, files: ImageFiles, epoch: int = 0, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[Tensor, Tensor]]:
    """An epoch's batches, by a loader of :data:`LOADERS`."""
    for batch in LOADERS[loader](files, epoch, batch_size):
        yield tuple(batch)


def error_in(batches: Iterable[Any]) -> str:
    """The message of the bad file that ends an epoch; ``DataLoader``'s workers end as soon as nothing refers to it."""
    try:
        for _ in batches:
            pass
    except BadFile as error:
        traceback.clear_frames(error.__traceback__)
        return str(error)
    raise AssertionError("no file was bad")


def order_of(files: ImageFiles, epoch: int = 0) -> list[int]:
    """The samples as every loader gives them."""
    return ShuffledSampler(len(files), seed=files.seed).order(epoch)


# Damage


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-60])


def no_photo(path: Path) -> None:
    path.write_bytes(b"no picture at all" * 40)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncated, "is damaged: image file is truncated"),
    "no JPEG": (no_photo, "is no JPEG file"),
    "empty": (empty, "is empty"),
    "vanished": (Path.unlink, "cannot be opened: No such file or directory"),
    "unreadable": (a_folder, "cannot be read: Is a directory"),
}


# Leftovers

SETTLED_S = 0.05


@dataclass(frozen=True)
class Traces:
    """All that this process holds and a loader may have made: compare one from before with one from after."""

    descriptors: list[str] = field(default_factory=lambda: _descriptors())
    children: list[int] = field(default_factory=lambda: sorted(child.pid for child in psutil.Process().children(True)))
    threads: list[str] = field(default_factory=lambda: sorted(str(thread.ident) for thread in threading.enumerate()))


def _descriptors() -> list[str]:
    """The open descriptors, once they no longer change: the thread of a queue closes its pipe in its own time."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(5.0)
    before, now = [""], _open_now()
    while now != before:
        time.sleep(SETTLED_S)
        before, now = now, _open_now()
    return now


def _open_now() -> list[str]:
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            targets.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{descriptor}")))
    return sorted(target for target in targets if "/matplotlib/" not in target)  # fonts, which it closes when it likes


def main() -> None:
    global CONTEXT
    loader, folder = sys.argv[1:]
    CONTEXT = None  # this process has no other threads
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    files = ImageFiles(DelayedStorage(LocalFolder(folder), latency_ms=150))
    for epoch in range(1_000_000):
        for _ in load(loader, files, epoch):
            print("a batch", flush=True)


if __name__ == "__main__":
    main()
