"""The settings of a loader, and what in its data set makes workers slow: long lists, tensors, open files and databases."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import data

from .events import is_own
from .settings import start_method

MANY = 20_000  # objects whose reference counts fill many pages
HANDLE_MODULES = (
    "zipfile",
    "tarfile",
    "h5py",
    "netCDF4",
    "lmdb",
    "sqlite3",
    "psycopg2",
    "pymysql",
    "redis",
    "pymongo",
    "socket",
)


def describe(loader: data.DataLoader[Any]) -> dict[str, Any]:
    """A loader's settings, and what its data set holds: for each, the class or module, its file, the attribute, and its kind."""
    dataset = loader.dataset
    length, iterable = _length(dataset), isinstance(dataset, data.IterableDataset)
    held = list(_held(dataset))
    long = [one for one in held if isinstance(one[2], (list, tuple, dict)) and len(one[2]) >= MANY]
    return {
        "dataset": type(dataset).__name__,
        "batches": None if iterable else _length(loader),  # asked of a stream, it would warn later
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "workers": loader.num_workers,
        "method": start_method(loader),
        "persistent": loader.persistent_workers,
        "prefetch": loader.prefetch_factor or 0,
        "in_order": loader.in_order,
        "getitem": _line_of_method(dataset),
        "collate": getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__),
        "handles": [_entry(*one) for one in held if _is_handle(one[2])],
        "lists": [_entry(*one) for one in sorted(long, key=lambda one: -len(one[2]))],
        "tensors": [_entry(*one) for one in held if length and _has_array(one[2], length)],
    }


def _entry(owner: Any, name: str, value: Any) -> tuple[str, str, str, str]:
    return *_place(owner), name, type(value).__name__


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except Exception:  # whatever the script's own __len__ raises
        return None


def _has_array(value: Any, length: int) -> bool:
    """Whether it is an array in memory of at least so many samples, or a tuple with one."""
    if isinstance(value, tuple):
        return any(_has_array(one, length) for one in value)
    in_memory = isinstance(value, (torch.Tensor, np.ndarray)) and not isinstance(value, np.memmap)
    return in_memory and value.ndim > 0 and len(value) >= length


def _is_handle(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        try:
            return not value.closed and value.fileno() > 2
        except Exception:  # a file in memory, or of whatever kind the script makes
            return False
    kind = type(value)
    if kind is getattr(sys.modules.get("lmdb"), kind.__name__, None):  # lmdb says that its types are builtins
        return True
    return kind.__module__.partition(".")[0].lstrip("_") in HANDLE_MODULES


def _place(owner: Any) -> tuple[str, str]:
    """The file of the script that makes an attribute, and the class; the class is empty for a module, the file in a notebook."""
    is_module = inspect.ismodule(owner)
    module = owner if is_module else sys.modules.get(type(owner).__module__)
    file = getattr(module, "__file__", None) or ""
    return file if is_own(file) else "", "" if is_module else type(owner).__name__


def _line_of_method(dataset: Any) -> str:
    """``file:line`` of the method that makes a sample; empty if it is in no file of the script."""
    for name in ("__getitems__", "__getitem__", "__iter__"):
        code = getattr(getattr(type(dataset), name, None), "__code__", None)
        if code is not None and is_own(code.co_filename):
            return f"{code.co_filename}:{code.co_firstlineno}"
    return ""


def _held(dataset: Any) -> Iterator[tuple[Any, str, Any]]:
    """The attributes of a data set and of what it wraps, and the globals that its methods name."""
    todo, seen = [dataset], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for name, value in getattr(one, "__dict__", {}).items():
            yield one, name, value
            inner = value if isinstance(value, (list, tuple)) and len(value) < 100 else [value]
            todo += [
                part
                for part in inner
                if isinstance(part, data.Dataset) or (_place(part)[0] and not inspect.ismodule(part))
            ]
        for name in ("__getitem__", "__getitems__", "__iter__"):
            method = getattr(type(one), name, None)
            for used in getattr(getattr(method, "__code__", None), "co_names", ()):
                module = sys.modules.get(getattr(method, "__module__", ""))
                if module is not None and used in vars(module):
                    yield module, used, vars(module)[used]
