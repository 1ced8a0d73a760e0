"""A loader with other settings than those that it was made with, over the same data set, sampler and collate function.

A setting is a dict: ``DataLoader``'s own arguments by their names, and four of our own: ``fetch_threads``, the threads that
fetch the samples of a batch; ``gc_freeze``, after which a worker's garbage collector looks only at new objects; ``one_thread``, in
which a worker computes; ``whole_batches``, one call of the data set with all indices of a batch. (``FastLoader`` fills whole
batches of image files, so other data sets cannot use it.) It imports torch alone, since it also runs in the processes of
somebody's script.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_structure
from torch.utils.data import DataLoader, IterableDataset, Subset, default_collate, default_convert

from .turn import NoTurn, Turn, one_line, take_turn

Setting = dict[str, Any]


def present(loader: DataLoader[Any]) -> Setting:
    """The setting that a loader was made with."""
    setting: Setting = {"num_workers": loader.num_workers}
    if loader.num_workers:
        setting |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "in_order": loader.in_order,
        }
    return setting


def start_method(loader: DataLoader[Any]) -> str:
    """How the workers of a loader are started."""
    context: Any = loader.multiprocessing_context or multiprocessing
    default = multiprocessing.get_all_start_methods()[0]
    return str(context.get_start_method(allow_none=True) or default)  # the script may still choose another


def put_in(loader: DataLoader[Any], setting: Setting) -> None:
    """Change a loader's settings. An iterator that it has made before keeps the old ones."""
    values = vars(loader)  # DataLoader itself refuses to have some of them changed
    own = {"fetch_threads", "gc_freeze", "one_thread", "whole_batches"}
    values.update({name: value for name, value in setting.items() if name not in own})
    values["_iterator"] = None
    if not loader.num_workers:
        loader.multiprocessing_context = None
        values.update({"prefetch_factor": None, "persistent_workers": False, "timeout": 0})
    elif loader.prefetch_factor is None:
        values["prefetch_factor"] = 2
    if threads := setting.get("fetch_threads"):
        values["dataset"] = ThreadedFetch(loader.dataset, threads)
    if setting.keys() & {"gc_freeze", "one_thread"}:
        values["worker_init_fn"] = WorkerInit(loader.worker_init_fn, setting)
    if setting.get("whole_batches"):
        values.update(
            sampler=loader.batch_sampler,
            batch_sampler=None,
            batch_size=None,
            collate_fn=default_convert,
            drop_last=False,
        )


def changed(loader: DataLoader[Any], setting: Setting) -> DataLoader[Any]:
    """A copy of a loader with another setting; it has no workers yet."""
    twin = object.__new__(type(loader))
    vars(twin).update(vars(loader))
    put_in(twin, setting)
    return twin


def length_of(loader: DataLoader[Any]) -> int | None:
    """The number of its batches; None if it does not tell, or has no end."""
    try:
        return len(getattr(loader._index_sampler, "of", loader))
    except (TypeError, NotImplementedError):
        return None


def loader_turn(
    loader: DataLoader[Any],
    counted: int,
    *,
    begin: Callable[[DataLoader[Any]], Iterator[Any]] = DataLoader.__iter__,
    patience_s: float = 0.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> Generator[Any, None, Turn]:
    """A turn of a loader: a whole epoch if it is short, or else so many batches and those before and after them.

    :param begin: ``DataLoader.__iter__``, which may have been replaced
    """
    head = max(1, loader.num_workers)
    ahead = max(1, loader.num_workers * (loader.prefetch_factor or 0))
    length, most = length_of(loader), head + counted + ahead
    batches = most if length is None else min(length, most)
    whole = batches == length
    if persistent := _keeps_workers(loader):  # or else they would go on while other loaders take their turns
        _limit(loader, batches)
    if whole:
        counted = max(1, batches - head)
    return take_turn(
        lambda: begin(loader),
        head,
        counted,
        rest=whole or persistent,
        patience_s=patience_s,
        interrupted=interrupted,
    )


class Twins:
    """A loader's copies with other settings, which take turns. Those with persistent workers are kept for their next turns."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._kept: dict[str, DataLoader[Any]] = {}

    def turn(self, setting: Setting, batches: int, **how: Any) -> Generator[Any, None, Turn]:
        """A turn with a setting.

        :param how: see :func:`loader_turn`
        :raises NoTurn: also for an error of the data set
        """
        name = str(setting)
        twin = self._kept.pop(name) if name in self._kept else changed(self._loader, setting)
        try:
            turn = yield from loader_turn(twin, batches, **how)
        except NoTurn:
            raise
        except Exception as error:  # of the data set, in a worker or here
            raise NoTurn(one_line(error)) from error
        if _keeps_workers(twin):
            self._kept[name] = twin
        return turn


def _keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether its workers stay for another turn: those of a stream would go on with it."""
    return loader.persistent_workers and not isinstance(loader.dataset, IterableDataset)


def _limit(loader: DataLoader[Any], batches: int) -> None:
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    if not isinstance(getattr(loader, name), First):
        vars(loader)[name] = First(getattr(loader, name))
    getattr(loader, name).most = batches  # in its place, since persistent workers' iterator refers to it


class First:
    """The first so many of what a sampler gives."""

    most = 0

    def __init__(self, of: Any) -> None:
        self.of = of

    def __len__(self) -> int:
        return min(self.most, len(self.of))

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.of, self.most)


class ThreadedFetch:
    """A copy of ``ThreadedFetch`` in dataloading/dataset/batches.py, which is what the doctor advises."""

    def __init__(self, dataset: Any, threads: int) -> None:
        self.dataset, self.threads = dataset, threads

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while it is pickled and unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        with ThreadPoolExecutor(self.threads, "fetch") as pool:
            return list(pool.map(self.dataset.__getitem__, indices))


class WorkerInit:
    """A loader's own ``worker_init_fn``, and then what a setting asks for in each worker."""

    def __init__(self, before: Callable[[int], object] | None, setting: Setting) -> None:
        self.before, self.setting = before, setting

    def __call__(self, worker: int) -> None:
        if self.before:
            self.before(worker)
        if self.setting.get("one_thread"):
            torch.set_num_threads(1)
            if cv2 := sys.modules.get("cv2"):
                cv2.setNumThreads(0)
        if self.setting.get("gc_freeze"):
            gc.freeze()


def facts_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The facts of a loader that a search needs."""
    iterable = isinstance(loader.dataset, IterableDataset)
    return {
        "present": present(loader),
        "length": length_of(loader),
        "iterable": iterable,
        "threads": not iterable and loader.batch_sampler is not None and is_one_by_one(loader.dataset),
        "whole_batches": not iterable and _gives_whole_batches(loader),
    }


def is_one_by_one(dataset: Any) -> bool:
    """Whether samples of a batch are fetched one by one. A ``Subset`` does as its data set does."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return not hasattr(dataset, "__getitems__")


def _gives_whole_batches(loader: DataLoader[Any]) -> bool:
    """Whether ``dataset[indices]`` is what collating ``dataset[index]`` gives, as of tensors in memory."""
    dataset: Any = loader.dataset
    if loader.batch_sampler is None or loader.collate_fn is not default_collate or hasattr(dataset, "__getitems__"):
        return False
    try:
        indices = [0, len(dataset) - 1]
        whole, collated = default_convert(dataset[indices]), default_collate([dataset[index] for index in indices])
        return tree_structure(whole) == tree_structure(collated) and all(
            map(torch.equal, tree_leaves(whole), tree_leaves(collated))
        )
    except Exception:  # most data sets take no list
        return False
