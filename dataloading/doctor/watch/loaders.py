"""The main process: which loaders it makes, when it asks for a batch, and when it gets one."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import struct
import sys
import threading
import time
import weakref
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor
from torch.utils import data
from torch.utils._pytree import tree_leaves

# HACK: DataLoader's own parts. If torch renames one, the script ends with an ImportError or AttributeError that names it.
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .dataset import describe
from .events import emit, file_of, frames, is_own, line_of, lines, made_at, replace, where
from .fetching import listen
from .sampling import sampler
from .settings import Setting, put_in

PLACE = os.environ.get("LOADER_DOCTOR_PLACE")  # file:line of a loader that gets another setting
SETTING: Setting = json.loads(os.environ.get("LOADER_DOCTOR_SETTING", "{}"))
LOOKS = 2  # batches of an iteration that are looked at closely
ELEMENTS, BYTE_VALUES = 4096, 256  # of a channel: looked at, and at most if its floats were bytes
numbers = weakref.WeakKeyDictionary[Any, int]()  # of the loaders that have been iterated over
_loaders, _iterations = itertools.count(), itertools.count()
# Seconds and bytes since they were cleared, of all threads: the one that pins memory receives the batches, too.
_totals = dict.fromkeys(("received", "pickled_bytes"), 0.0)
_starting = -1  # the loader that starts its workers
_first: list[float] = []  # the moment of the first batch


def _take(name: str) -> float:
    taken, _totals[name] = _totals[name], 0.0
    return taken


@replace(data.DataLoader, "__init__")
def make(original: Any, self: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
    """A loader that a library makes for the data set of one of the script's loaders counts as that loader."""
    maker = sys._getframe(2)  # frame 1 is the function in the constructor's place
    line = self._doctor_line = made_at(self, dataset, maker)
    original(self, dataset, *args, **kwargs)
    # A library's loader has got its settings from the script's.
    if line == PLACE and (is_own(maker.f_code.co_filename) or id(dataset) not in lines):
        put_in(self, SETTING)
        lines[id(self.dataset)] = line


@replace(data.DataLoader, "__iter__")
def iterate(original: Any, self: Any) -> Any:
    global _starting
    if self not in numbers:
        numbers[self] = next(_loaders)
        line = getattr(self, "_doctor_line", "") or where()
        emit("loader", loader=numbers[self], line=line, **describe(self))
        listen()
    sampler.stop()
    _take("pickled_bytes")
    before = getattr(self, "_iterator", None)
    began, _starting = time.monotonic(), numbers[self] if self.num_workers else -1
    _wait_since(began)
    try:
        iterator = original(self)
    finally:
        _starting = -1
        _wait_since(0.0)
    iterator._doctor = numbers[self], next(_iterations)
    emit(
        "iterator",
        loader=numbers[self],
        iterator=iterator._doctor[1],
        began=began,
        ended=time.monotonic(),
        reused=before is iterator,
        workers=[process.pid for process in getattr(iterator, "_workers", ())],
        pickled_bytes=_take("pickled_bytes"),
    )
    sampler.start()
    return iterator


@replace(_BaseDataLoaderIter, "__next__")
def next_batch(original: Any, self: Any) -> Any:
    if not hasattr(self, "_doctor"):
        return original(self)
    sampler.loader, iteration = self._doctor
    began = time.monotonic()
    _wait_since(began)
    try:
        batch = original(self)
    except StopIteration:
        emit("end", loader=sampler.loader, iterator=iteration, began=began, ended=time.monotonic())
        raise
    finally:
        _wait_since(0.0)
    now = time.monotonic()
    close = _look(batch) if self._num_yielded <= LOOKS else {}
    emit(
        "batch",
        loader=sampler.loader,
        iterator=iteration,
        began=began,
        ended=now,
        received=_take("received"),
        **close,
    )
    if not _first:
        _first.append(now)
        _wait_since(0.0)
    return batch


def _wait_since(moment: float) -> None:
    """Tell who looks from outside since when this process waits for a loader, 0 if it does not, and when it got its first batch."""
    os.pwrite(file_of("waits"), struct.pack("dd", moment, *(_first or [0.0])), 0)


def _look(batch: Any) -> dict[str, int]:
    """The bytes of a batch's tensors, and those of floats that take few values, as bytes do."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return {"bytes": sum(map(_size, tensors)), "floats_of_bytes": sum(map(_size, filter(_are_bytes, tensors)))}


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _are_bytes(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    if not is_plain or not tensor.is_floating_point() or tensor.dim() < 3 or not len(tensor):
        return False
    channels = tensor[0].detach().flatten(1) if tensor.dim() > 3 else tensor[:1].detach().flatten(1)
    if channels.shape[0] > 4:  # channels last
        channels = channels.reshape(-1, tensor.shape[-1]).T
    few = [channel[:: max(1, len(channel) // ELEMENTS)].unique() for channel in channels]
    return channels.shape[1] >= 2 * BYTE_VALUES and all(2 < len(values) <= BYTE_VALUES for values in few)


@replace(reduction.ForkingPickler, "loads")
def receive(original: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
    began = time.monotonic()
    received = original(sent, *args, **kwargs)
    _totals["received"] += time.monotonic() - began
    return received


@replace(reduction, "dump")
def pickle_worker(original: Any, process: Any, file: Any, *args: Any) -> None:
    """A worker that is not forked gets its data set pickled."""
    original(process, file, *args)
    _totals["pickled_bytes"] += file.tell()


def _before_fork() -> None:
    """Threads that live now are not in the child, and locks that they hold stay locked there."""
    if _starting < 0 or multiprocessing.parent_process() is not None:
        return
    stacks, alive = sys._current_frames(), []
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.name != "QueueFeederThread":
            own = [one for one in frames(stacks.get(thread.ident or 0)) if is_own(one.f_code.co_filename)]
            alive.append((thread.name, line_of(own[0] if own else None)))
    stacks.clear()  # it has this very frame: a cycle, which would keep the loader and its workers
    if alive:
        emit("threads", loader=_starting, alive=alive)


os.register_at_fork(before=_before_fork)
