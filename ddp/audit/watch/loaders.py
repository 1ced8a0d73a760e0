"""Data loaders: which samples each iterator gives out, in which order, and a checksum of what arrives."""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import dataloader

from .events import emit, is_below, quiet, watch, where
from .tensors import find_tensors, rows

INIT = 9  # the place of worker_init_fn among the arguments of a worker
_iterators = 0


def install() -> None:
    base = dataloader._BaseDataLoaderIter

    @watch(data.DataLoader, "__init__")
    def make(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        self._audit_made = where()
        original(self, *args, **kwargs)

    @watch(data.DataLoader, "__iter__")
    def iterate(original: Any, self: Any) -> Any:
        result = original(self)
        _begin(self, result)
        return result

    @watch(base, "_next_index")
    def next_index(original: Any, self: Any) -> Any:
        indices = original(self)
        self.__dict__.setdefault("_audit_indices", []).append(indices)
        return indices

    @watch(base, "__next__")
    def next_batch(original: Any, self: Any) -> Any:
        try:
            batch = original(self)
        except StopIteration:
            emit("epoch_end", iterator=self.__dict__.get("_audit_number"))
            raise
        _arrived(self, batch)
        return batch

    for subclass in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
        subclass.__next__ = base.__next__  # type: ignore[method-assign]
    weighted = data.WeightedRandomSampler

    @watch(weighted, "__init__")
    def weigh(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        emit("weighted_sampler", sampler=id(self), where=where())

    @watch(weighted, "__iter__")
    def iterate_weighted(original: Any, self: Any) -> Any:
        emit("weighted_order", sampler=id(self), where=where())
        return original(self)

    worker = torch.utils.data._utils.worker

    @watch(worker, "_worker_loop")
    def work(original: Any, *args: Any) -> None:
        dataset, seeds = args[1], args[INIT]
        if isinstance(dataset, list):
            (dataset,) = dataset  # so in torch 2.14; the worker empties the list

        def begin(number: int) -> None:
            if seeds is not None:
                seeds(number)
            _emit_states("worker", dataset)

        try:
            original(*args[:INIT], begin, *args[INIT + 1 :])
        finally:
            _emit_states("worker_end", dataset)


@quiet
def _begin(loader: Any, iterator: Any) -> None:
    global _iterators
    _iterators += 1
    iterator._audit_number = _iterators
    iterator.__dict__["_audit_indices"] = iterator.__dict__.get("_audit_indices") or []
    sampler = (
        loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", loader.sampler)
    )
    dataset = loader.dataset
    iterable = isinstance(dataset, data.IterableDataset)
    emit(
        "epoch",
        iterator=_iterators,
        length=None if iterable else _length(dataset),
        iterable=iterable,
        evaluates=not is_below("torch.optim.swa_utils"),
        sampler=type(sampler).__name__,
        replicas=getattr(sampler, "num_replicas", None),
        workers=loader.num_workers,
        where=loader._audit_made,
    )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


@quiet
def _arrived(iterator: Any, batch: Any) -> None:
    queue = iterator.__dict__.get("_audit_indices") or []
    indices = queue.pop(0) if queue else None
    flat = _integers(indices)
    labels = [
        tensor for tensor in find_tensors(batch) if not tensor.is_floating_point()
    ]  # no augmentation changes them
    number = iterator.__dict__.get("_audit_number")
    emit("batch", iterator=number, indices=flat, rows=rows(batch), targets=rows(labels))


def _integers(indices: Any) -> list[int] | None:
    """The sample numbers of a batch; None if the sampler's keys are none."""
    if isinstance(indices, int):
        return [indices]
    if isinstance(indices, Tensor):
        return indices.reshape(-1).tolist()
    samples = getattr(indices, "samples", indices)
    if isinstance(samples, np.ndarray):
        return samples.reshape(-1).tolist()
    if isinstance(samples, (list, tuple)) and samples and isinstance(samples[0], tuple):
        samples = [one[0] for one in samples]
    if isinstance(samples, (list, tuple)) and all(isinstance(one, (int, np.integer)) for one in samples):
        return [int(one) for one in samples]
    return None


def _generators(dataset: Any) -> list[Any]:
    """The states of the generators that a data set holds, and of those below it."""
    states: list[Any] = []
    for _ in range(4):
        for value in (*vars(type(dataset)).values(), *getattr(dataset, "__dict__", {}).values()):
            if isinstance(value, np.random.Generator):
                states.append(value.bit_generator.state)
            elif isinstance(value, np.random.RandomState):
                states.append(value.get_state())
            elif isinstance(value, random.Random):
                states.append(value.getstate())
            elif isinstance(value, torch.Generator):
                states.append(value.get_state().tolist())
        dataset = getattr(dataset, "dataset", None)
    return states


def _emit_states(kind: str, dataset: Any) -> None:
    """Checksums of the generators that a worker's data set holds, and of the worker's own."""
    own = [np.random.get_state(), random.getstate(), torch.get_rng_state().tolist()]
    held, of_worker = ([zlib.crc32(repr(state).encode()) for state in states] for states in (_generators(dataset), own))
    emit(kind, generators=held, worker=of_worker)
