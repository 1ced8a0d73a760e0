"""Data loaders: which samples each iterator gives out, in which order, and a checksum of what arrives."""

from __future__ import annotations

import itertools
import operator
import pickle
import random
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data

# HACK: DataLoader's own parts. If torch renames one, the audit says that loaders are not watched.
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .event_types import Batch, LoaderBegins, LoaderEnds, WeightedMade, WeightedOrder, Worker
from .events import Call, Look, emit, identity, is_below, watch, where
from .tensors import find_tensors, rows

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_next_number = itertools.count()


@watch(data.DataLoader, "__init__")
def make(call: Call) -> Look:
    call.args[0]._audit_made = where()
    yield


@watch(_BaseDataLoaderIter, "__init__")
def make_iterator(call: Call) -> Look:
    """A loader with workers asks for the first indices before its ``__iter__`` returns."""
    call.args[0]._audit_number, call.args[0]._audit_indices = None, []
    yield


@watch(data.DataLoader, "__iter__")
def iterate(call: Call) -> Look:
    yield
    loader, iterator = call.args[0], call.result
    iterator._audit_number = next(_next_number)
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    iterable = isinstance(loader.dataset, data.IterableDataset)
    divided = getattr(sampler, "dataset", loader.dataset)  # a sampler may divide the order of another one
    event = LoaderBegins(
        iterator=iterator._audit_number,
        dataset=identity(loader.dataset),
        length=0 if iterable else operator.length_hint(divided),  # 0 if it is not known
        batches=0 if iterable else operator.length_hint(loader),
        iterable=iterable,
        evaluates=not is_below("torch.optim.swa_utils"),
        sampler=type(sampler).__name__,
        replicas=getattr(sampler, "num_replicas", None),
        batch_size=_batch_size(loader),
        workers=loader.num_workers,
        where=loader._audit_made,
    )
    emit(event)


def _batch_size(loader: Any) -> int | None:
    """The samples of a batch; None if the script gave a batch sampler of its own, or a data set that makes batches."""
    batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    batches = getattr(batches, "batch_sampler", batches)  # a library's, around torch's
    # Around that of torch there may be a sampler of the script's own. Then the loader has the size that it was made with.
    return batches.batch_size if type(batches) is data.BatchSampler else loader.batch_size


@watch(_BaseDataLoaderIter, "_next_index")
def next_index(call: Call) -> Look:
    yield
    call.args[0]._audit_indices.append(call.result)


@watch(_BaseDataLoaderIter, "__next__")
def next_batch(call: Call) -> Look:
    iterator = call.args[0]
    try:
        yield
    except GeneratorExit:  # there is no further batch
        emit(LoaderEnds(iterator=iterator._audit_number))
        return
    indices = _integers(iterator._audit_indices.pop(0) if iterator._audit_indices else None)
    labels = [one for one in find_tensors(call.result) if not one.is_floating_point()]  # no augmentation changes them
    emit(Batch(iterator=iterator._audit_number, indices=indices, rows=rows(call.result), targets=rows(labels)))


def _integers(indices: Any) -> list[int] | None:
    """The sample numbers of a batch; None if the sampler's keys are none."""
    samples = getattr(indices, "samples", indices)
    if isinstance(samples, (Tensor, np.ndarray)):
        return samples.reshape(-1).tolist()
    if not isinstance(samples, (list, tuple)):
        samples = [samples]
    # A key may have a flag beside the number.
    numbers: list[Any] = [
        next((part for part in one if type(part) is not bool and hasattr(part, "__index__")), None)
        if isinstance(one, tuple)
        else one
        for one in samples
    ]
    return list(map(int, numbers)) if all(isinstance(one, (int, np.integer)) for one in numbers) else None


@watch(data.WeightedRandomSampler, "__init__")
def weigh(call: Call) -> Look:
    emit(WeightedMade(sampler=identity(call.args[0])))
    yield


@watch(data.WeightedRandomSampler, "__iter__")
def iterate_weighted(call: Call) -> Look:
    emit(WeightedOrder(sampler=identity(call.args[0])))
    yield


@watch(fetch._BaseDatasetFetcher, "__init__")
@watch(fetch._IterableDatasetFetcher, "fetch")
@watch(fetch._MapDatasetFetcher, "fetch")
def fetched(call: Call) -> Look:
    """The states of a loader worker's generators, and of those that its data set holds, at its start and after each batch."""
    yield
    if data.get_worker_info():
        own = [np.random.mtrand._rand, random._inst, torch.default_generator]
        emit(Worker(generators=_checksums(_generators(call.args[0].dataset)), worker=_checksums(own)))


def _generators(dataset: Any) -> list[Any]:
    """Those that a data set holds, and those below it."""
    held: list[Any] = []
    for _ in range(4):
        values = (*vars(type(dataset)).values(), *getattr(dataset, "__dict__", {}).values())
        held += [value for value in values if isinstance(value, GENERATORS)]
        dataset = getattr(dataset, "dataset", None)
    return held


def _checksums(generators: list[Any]) -> list[int]:
    # How torch pickles a generator depends on addresses.
    states = [one.get_state().numpy() if isinstance(one, torch.Generator) else one for one in generators]
    return [zlib.crc32(pickle.dumps(state)) for state in states]
