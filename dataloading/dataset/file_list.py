"""The list of a data set's files, as two arrays instead of a Python list.

A forked loader worker shares its parent's memory page by page until either writes to a page. Reading a Python string
*is* a write: it changes the reference count in the object's header. So each worker copies a list of a million strings, page
by page, during an epoch (pytorch#13246). Here the names are one array of bytes, which no reader writes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt


class FileList:
    """A sequence of names that takes their bytes and eight more per name, and stays shared with forked workers.

    :param names: relative to the data set's root, with ``/`` between folder and file
    """

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self._ends):
            raise IndexError(f"there is no file {index}: the data set has {len(self._ends)}")
        start = self._ends[index - 1] if index else 0
        return self._bytes[start : self._ends[index]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def subset(self, indices: npt.NDArray[np.int64]) -> FileList:
        """A list of some of the names."""
        return FileList(self[int(index)] for index in indices)
