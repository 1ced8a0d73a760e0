"""The memory of tensors, each piece of it counted once, and of the process."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each piece of memory that tensors lie in, by its address. Of a ``DTensor``, this rank's shard counts."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    return {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local if not t.is_meta)}


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in."""
    return sum(storages(tensors).values())


def all_tensors() -> list[Tensor]:
    """All tensors that Python knows."""
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]  # isinstance() wakes lazy objects


def process_bytes(name: str) -> int:
    """What /proc/self/status gives under a name, such as VmRSS, the memory of the process, or VmHWM, its maximum; bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
