"""ddp/sampler.py: the same global batches at every world size, and every test sample once."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler, TensorDataset

from common.randomness import derive_seed
from ddp.sampler import MicroBatchSampler, ShardSampler


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def global_batches(
    samples: int, batch_size: int, world_size: int, grad_accumulation_steps: int, epoch: int, seed: int
) -> list[set[int]]:
    """The samples that all ranks and micro-steps together take in each optimizer step."""
    steps: list[list[int]] = []
    for rank in range(world_size):
        sampler = MicroBatchSampler(dataset(samples), batch_size, grad_accumulation_steps, world_size, rank, seed)
        sampler.set_epoch(epoch)
        keys = list(sampler)
        assert len(keys) == len(sampler)
        for number, key in enumerate(keys):
            assert key.epoch == epoch
            assert len(key.samples) == batch_size // (world_size * grad_accumulation_steps)
            while len(steps) <= number // grad_accumulation_steps:
                steps.append([])
            steps[number // grad_accumulation_steps] += key.samples.tolist()
    for step in steps:
        assert len(set(step)) == len(step) == batch_size
    return [set(step) for step in steps]


@given(
    parts=st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (4, 3), (6, 2)]),
    batches=st.integers(1, 5),
    tail=st.integers(0, 11),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_global_batches_do_not_depend_on_ranks_or_micro_steps(
    parts: tuple[int, int], batches: int, tail: int, epoch: int, seed: int
) -> None:
    """The global batches of an epoch are the same for 1 to 4 ranks and any number of micro-steps.

    Claim (README.md): 1, 2, 3, 4 ranks take the same global batches.
    """
    world_size, grad_accumulation_steps = parts
    samples = 12 * batches + tail
    expected = global_batches(samples, 12, 1, 1, epoch, seed)
    assert len(expected) == samples // 12
    assert global_batches(samples, 12, world_size, grad_accumulation_steps, epoch, seed) == expected


def test_it_takes_what_torch_s_own_sampler_takes() -> None:
    """Each rank takes the samples that torch's DistributedSampler gives it.

    Claim (ddp/README.md, 3): the sampler takes what torch's takes; without `set_epoch` the order repeats.
    """
    ours = MicroBatchSampler(dataset(103), 12, 2, 3, 1, seed=7)
    theirs: DistributedSampler[int] = DistributedSampler(
        dataset(103), 3, 1, seed=derive_seed(7, "shuffle"), drop_last=True
    )
    for epoch in range(3):
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        taken = np.concatenate([key.samples for key in ours])
        assert taken.tolist() == list(theirs)[: len(taken)]


def test_without_set_epoch_the_order_repeats() -> None:
    """Without ``set_epoch`` each epoch has the same order.

    Claim (ddp/README.md, 3): the sampler takes what torch's takes; without `set_epoch` the order repeats.
    """
    sampler = MicroBatchSampler(dataset(60), 12, 1, 1, 0, seed=0)
    first, second = ([key.samples.tolist() for key in sampler] for _ in range(2))
    assert first == second


@given(samples=st.integers(1, 60), batch_size=st.integers(1, 20), world_size=st.integers(1, 7))
def test_evaluation_takes_every_sample_once(samples: int, batch_size: int, world_size: int) -> None:
    taken: list[int] = []
    for rank in range(world_size):
        sampler = ShardSampler(samples, batch_size, world_size, rank)
        keys = list(sampler)
        assert len(keys) == len(sampler)
        taken += [sample for key in keys for sample in key.samples.tolist()]
    assert sorted(taken) == list(range(samples))
