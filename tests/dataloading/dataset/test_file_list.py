"""``dataloading.dataset.file_list``: every name comes back, and loader workers share its memory for good."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

from dataloading.dataset.file_list import FileList

# All that the file system may give: Unicode, and single bytes that are no UTF-8.
names = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])),
        st.binary().map(lambda data: data.decode("utf-8", "surrogateescape")),
    )
)


@given(names)
def test_every_name_comes_back(given_names: list[str]) -> None:
    files = FileList(given_names)
    assert len(files) == len(given_names)
    assert list(files) == given_names
    assert [files[i] for i in range(len(files))] == given_names
    assert list(pickle.loads(pickle.dumps(files))) == given_names


@given(names, st.data())
def test_a_subset_has_the_names_asked_for_in_that_order(given_names: list[str], data: st.DataObject) -> None:
    picked = data.draw(st.lists(st.integers(0, len(given_names) - 1))) if given_names else []
    subset = FileList(given_names).subset(np.array(picked, np.int64))
    assert list(subset) == [given_names[i] for i in picked]


@pytest.mark.parametrize("index", [-1, 3, 100])
def test_there_is_nothing_before_the_first_and_after_the_last(index: int) -> None:
    with pytest.raises(IndexError, match=f"there is no file {index}: the data set has 3"):
        FileList("abc")[index]


class NameLookup(Dataset[Any]):
    """Looks up the names of a batch, and returns the worker's number and its private memory."""

    def __init__(self, files: FileList | list[str]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitems__(self, samples: Sequence[int]) -> tuple[int, int]:
        for sample in samples:
            assert self.files[sample]
        info = get_worker_info()
        assert info is not None
        return info.id, psutil.Process().memory_full_info().uss


def growth_over_ten_epochs(files: FileList | list[str]) -> float:
    """By how many MB each worker grew, at most, since its first batch."""
    batches = [range(start, start + 40_000) for start in range(0, len(files), 40_000)]
    loader = DataLoader(
        NameLookup(files),
        batch_sampler=batches,  # type: ignore[arg-type]
        num_workers=2,
        collate_fn=_keep,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    first: dict[int, int] = {}
    growth: dict[int, int] = {}
    for _ in range(10):
        batches.append(batches.pop(0))  # what one worker had in the last epoch is now the other's
        for worker, memory in loader:
            first.setdefault(worker, memory)
            growth[worker] = memory - first[worker]
    assert len(growth) == 2
    return max(growth.values()) / 1e6


def _keep(item: Any) -> Any:
    return item


@functools.cache
def _million_names() -> list[str]:
    return [f"First_Last_{i % 5000}/First_Last_{i % 5000}_{i:07d}.jpg" for i in range(1_000_000)]


@pytest.mark.slow
def test_a_workers_own_memory_stays_flat_over_ten_epochs_of_a_million_names() -> None:
    """A worker's own memory stays flat over ten epochs of a million names.

    Claim (dataloading/README.md, 4): a `FileList` stays shared.
    """
    assert growth_over_ten_epochs(FileList(_million_names())) < 10


@pytest.mark.slow
def test_with_a_python_list_it_grows_by_the_list() -> None:
    """With a Python list of names, a worker's own memory grows by the list.

    Counting a reference writes to the page that a name lies on (pytorch#13246).

    Claim (dataloading/README.md, 4): a list of strings does not stay shared.
    """
    assert growth_over_ten_epochs(_million_names()) > 60
