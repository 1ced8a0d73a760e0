"""``dataloading.dataset.sampler``: an order that is a function of (seed, epoch), and keys that carry the epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from common.data.datasets import BatchKey
from dataloading.dataset.sampler import SampleKey, ShuffledBatches, ShuffledSampler, as_batch_key


def keys_in(sampler: ShuffledSampler, epoch: int) -> list[SampleKey]:
    sampler.set_epoch(epoch)
    return list(sampler)


@given(samples=st.integers(0, 100), seed=st.integers(0, 1 << 40), epoch=st.integers(0, 1000))
def test_every_sample_comes_once_in_an_order_of_the_seed_and_the_epoch(samples: int, seed: int, epoch: int) -> None:
    keys = keys_in(ShuffledSampler(samples, seed=seed), epoch)
    assert sorted(keys) == [SampleKey(epoch, sample) for sample in range(samples)]
    used = ShuffledSampler(samples, seed=seed)
    list(used)
    assert keys_in(used, epoch) == keys


def test_another_seed_and_another_epoch_have_another_order() -> None:
    orders = [tuple(ShuffledSampler(50, seed=seed).order(epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25


@given(samples=st.integers(1, 10), length=st.integers(0, 35), epoch=st.integers(0, 5))
def test_a_length_takes_one_order_after_the_other_as_of_this_epoch(samples: int, length: int, epoch: int) -> None:
    sampler = ShuffledSampler(samples, length=length)
    keys = keys_in(sampler, epoch)
    assert len(keys) == len(sampler) == length
    assert {key.epoch for key in keys} <= {epoch}
    orders = [sample for number in range(epoch, epoch + 36) for sample in sampler.order(number)]
    assert [key.sample for key in keys] == orders[:length]


@given(samples=st.integers(0, 40), batch_size=st.integers(1, 12), drop_last=st.booleans(), epoch=st.integers(0, 3))
def test_batches_are_torchs_batches(samples: int, batch_size: int, drop_last: bool, epoch: int) -> None:
    batches = ShuffledBatches(ShuffledSampler(samples), batch_size, drop_last=drop_last)
    batches.set_epoch(epoch)
    order = ShuffledSampler(samples).order(epoch)
    reference = BatchSampler(order, batch_size, drop_last)
    assert [key.samples.tolist() for key in batches] == list(reference)
    assert {key.epoch for key in batches} <= {epoch}
    assert len(batches) == len(reference)


def test_plain_indices_are_of_the_epoch_that_was_set() -> None:
    batches = ShuffledBatches(SequentialSampler(range(3)), 2)
    assert [key.epoch for key in batches] == [0, 0]
    batches.set_epoch(6)
    assert [(key.epoch, key.samples.tolist()) for key in batches] == [(6, [0, 1]), (6, [2])]


def test_an_epoch_that_is_set_later_is_for_the_next_iterator() -> None:
    sampler, batches = ShuffledSampler(7), ShuffledBatches(SequentialSampler(range(7)), 2)
    sampler_keys, batch_keys = iter(sampler), iter(batches)
    order = [next(sampler_keys).sample]
    sampler.set_epoch(1)
    batches.set_epoch(1)
    rest = list(sampler_keys)
    assert order + [key.sample for key in rest] == sampler.order(0)
    assert {key.epoch for key in rest} == {key.epoch for key in batch_keys} == {0}


@pytest.mark.parametrize(
    "batch, expected",
    [
        (BatchKey(4, np.array([5, 6])), (4, [5, 6])),
        ([SampleKey(4, 5), SampleKey(4, 6)], (4, [5, 6])),
        ([5, 6], (9, [5, 6])),
        (torch.tensor([5, 6]), (9, [5, 6])),
        (np.array([5, 6]), (9, [5, 6])),
        ((5,), (9, [5])),
        ([], (9, [])),
    ],
)
def test_whatever_a_batch_sampler_yields_becomes_a_batch_key(
    batch: BatchKey | Sequence[int | SampleKey], expected: tuple[int, list[int]]
) -> None:
    key = as_batch_key(batch, 9)
    assert (key.epoch, key.samples.tolist()) == expected
    assert key.samples.dtype == np.int64
