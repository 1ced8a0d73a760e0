"""A turn of a loader, and the copies of it that take turns."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from dataloading.dataset import batches
from dataloading.doctor.watch import settings
from dataloading.doctor.watch.settings import Twins, changed, facts_of, loader_turn, put_in
from dataloading.doctor.watch.turn import NoTurn, alone, take_turn


def test_a_turn_times_the_batches_after_its_head() -> None:
    asked: list[int] = []
    measured = alone(take_turn(lambda: iter(range(10)), 2, 4, rest=False), lambda number, batch: asked.append(batch))
    assert asked == [0, 1, 2, 3, 4, 5]  # and no further
    assert (measured.head, measured.counted, len(measured.waits)) == (2, 4, 6)
    assert alone(take_turn(lambda: iter(range(10)), 2, 4, rest=True)).end_s > 0
    with pytest.raises(NoTurn, match="gave 1 batches"):
        alone(take_turn(lambda: iter(range(1)), 2, 4, rest=False))


def test_a_batch_that_does_not_come_ends_the_turn() -> None:
    def slow() -> Any:
        yield 0
        time.sleep(60)

    with pytest.raises(NoTurn, match="no batch in"):
        alone(take_turn(slow, 1, 1, rest=False, patience_s=0.2))


def test_an_interrupted_use_counts_as_the_others_do() -> None:
    interruptions = iter([False, False, True, False])
    measured = alone(take_turn(lambda: iter(range(4)), 1, 3, rest=True, interrupted=lambda: next(interruptions)))
    assert measured.uses[2] == pytest.approx((measured.uses[0] + measured.uses[1]) / 2)


def test_a_copy_of_a_loader_has_the_setting_and_the_loader_keeps_its_own() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    twin = changed(loader, {"num_workers": 2, "persistent_workers": True, "in_order": False})
    twin.multiprocessing_context = "spawn"
    assert (twin.num_workers, twin.prefetch_factor, twin.persistent_workers) == (2, 2, True)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    put_in(twin, {"num_workers": 0})
    assert str(list(twin)) == str(list(loader))
    threads = changed(loader, {"num_workers": 0, "fetch_threads": 2})
    assert str(list(threads)) == str(list(loader))
    assert threads.dataset.tensors is loader.dataset.tensors  # type: ignore[attr-defined]


def test_whole_batches_are_offered_where_they_are_the_same() -> None:
    in_memory = DataLoader(TensorDataset(torch.arange(10), torch.arange(10.0)), batch_size=4)
    assert facts_of(in_memory)["whole_batches"]
    whole = changed(in_memory, {"num_workers": 0, "whole_batches": True})
    assert str(list(whole)) == str(list(in_memory))
    assert len(whole) == len(in_memory)
    listed: Any = list(range(10))  # takes no list of indices
    assert not facts_of(DataLoader(listed, batch_size=4))["whole_batches"]
    own_collate = DataLoader(TensorDataset(torch.arange(10)), 4, collate_fn=lambda items: default_collate(items))
    assert not facts_of(own_collate)["whole_batches"]


def test_a_short_epoch_is_one_turn() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    assert len(alone(loader_turn(loader, 100)).waits) == 6
    assert len(alone(loader_turn(loader, 2)).waits) == 3


def test_persistent_workers_go_on_after_a_turn_of_a_part() -> None:
    loader = DataLoader(TensorDataset(torch.arange(12)), num_workers=1, persistent_workers=True)
    assert len(alone(loader_turn(loader, 2)).waits) == 5  # with those that are prefetched
    workers = loader._iterator
    assert len(alone(loader_turn(loader, 100)).waits) == 12
    assert workers is not None and loader._iterator is workers


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10**9)


class EndlessSampler:
    """``len`` of a loader with it fails."""

    def __iter__(self) -> Iterator[int]:
        return iter(lambda: 0, 1)


def test_twins_keep_persistent_workers_and_name_errors() -> None:
    data: Any = list(range(100))
    twins = Twins(DataLoader(data, sampler=EndlessSampler(), batch_size=2))
    kept = {"num_workers": 1, "persistent_workers": True}
    alone(twins.turn(kept, 2))
    (twin,) = twins._kept.values()
    workers = twin._iterator
    alone(twins.turn(kept, 2))
    assert workers is not None and twin._iterator is workers
    stream = Twins(DataLoader(Endless()))
    alone(stream.turn(kept, 2))
    assert not stream._kept
    with pytest.raises(NoTurn, match="TypeError: "):
        alone(Twins(DataLoader([None], batch_size=2)).turn({"num_workers": 0}, 2))  # type: ignore[arg-type]


def test_threads_are_offered_where_samples_are_fetched_one_by_one() -> None:
    one_by_one = TensorDataset(torch.arange(8))
    assert facts_of(DataLoader(Subset(Subset(one_by_one, [1, 2]), [0])))["threads"]
    whole = batches.ThreadedFetch(one_by_one, 2)
    assert not facts_of(DataLoader(Subset(whole, [1, 2])))["threads"]
    assert facts_of(DataLoader(Endless()))["iterable"]


@pytest.mark.parametrize("fetch", [batches.ThreadedFetch, settings.ThreadedFetch])
def test_a_data_set_that_is_fetched_in_threads_is_as_it_was(fetch: Any) -> None:
    data = TensorDataset(torch.arange(8))
    threaded = pickle.loads(pickle.dumps(fetch(data, 2)))
    assert len(threaded) == 8
    assert threaded[3] == data[3]
    assert torch.equal(threaded.tensors[0], data.tensors[0])
    assert threaded.__getitems__([5, 1]) == [data[5], data[1]]
