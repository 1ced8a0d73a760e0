"""Which samples each rank takes: torch's ``DistributedSampler``, extended to hand out whole micro-batches.

``DistributedSampler`` shuffles the indices the same way on every rank, by (seed, epoch), and gives rank r of W those at
positions r, r + W, r + 2W, ..., counted from 0. So the ranks' n-th micro-batches together are a contiguous piece of the
shuffled order, and the optimizer's steps see the same global batches at every world size and with every number of micro-steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import numpy.typing as npt
from torch.utils.data import DistributedSampler

from common.data.datasets import BatchKey
from common.randomness import derive_seed, shuffled


class MicroBatchSampler(DistributedSampler[BatchKey]):
    """A batch sampler (``DataLoader(batch_sampler=...)``) for training: every micro-batch is full, on every rank.

    The tail that does not fill a global batch is left out: different samples in each epoch. ``set_epoch`` must be called
    before each epoch: it changes the order and, through :class:`BatchKey`, the augmentation. Its second argument says where to
    begin, counted in global batches, which are the same samples at every world size.

    :param batch_size: samples per optimizer step, over all ranks and micro-steps; divisible by their product
    :param grad_accumulation_steps: micro-batches that each rank contributes to an optimizer step
    :param seed: of the orders. ``DistributedSampler`` uses seed + epoch, so runs with the seeds 0 and 1 would share orders, an
        epoch apart. Hashing the seed first prevents that
    """

    def __init__(
        self, dataset: Sized, batch_size: int, grad_accumulation_steps: int, num_replicas: int, rank: int, seed: int
    ) -> None:
        super().__init__(
            dataset,  # type: ignore[arg-type]  # its length is all that is asked for
            num_replicas,
            rank,
            shuffle=True,
            seed=derive_seed(seed, "shuffle"),
            drop_last=True,
        )
        self.micro_batch_size, remainder = divmod(batch_size, num_replicas * grad_accumulation_steps)
        if remainder:
            raise ValueError(f"{batch_size=} does not divide over {num_replicas=} times {grad_accumulation_steps=}")
        self.grad_accumulation_steps = grad_accumulation_steps
        self.batch_size = batch_size
        self._run_seed = seed
        self.steps_per_epoch = len(dataset) // batch_size
        self.first_step = 0
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))  # of an epoch

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Begin ``epoch`` (the next time this is iterated over) with its optimizer step ``first_step``, counted from 0."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def global_batch(self, step: int) -> npt.NDArray[np.int64]:
        """The samples of all ranks and micro-steps in an optimizer step of this epoch: int64 ``[batch_size]``."""
        if self._order[0] != self.epoch:
            self._order = self.epoch, shuffled(len(self.dataset), self._run_seed, self.epoch)  # type: ignore[arg-type]
        return self._order[1][step * self.batch_size : (step + 1) * self.batch_size]

    def __iter__(self) -> Iterator[BatchKey]:
        indices = np.fromiter(super().__iter__(), np.int64, self.num_samples)
        for micro_batch in range(
            self.first_step * self.grad_accumulation_steps, self.steps_per_epoch * self.grad_accumulation_steps
        ):
            start = micro_batch * self.micro_batch_size
            yield BatchKey(self.epoch, indices[start : start + self.micro_batch_size])

    def __len__(self) -> int:
        """Micro-batches of this rank until the epoch's end."""
        return (self.steps_per_epoch - self.first_step) * self.grad_accumulation_steps


class ShardSampler:
    """A batch sampler for evaluation: every sample on exactly one rank, none padded, none dropped.

    Ranks may get one batch more or less than others, which is harmless as long as no collective runs per batch.
    """

    def __init__(self, samples: int, batch_size: int, num_replicas: int, rank: int) -> None:
        self._indices = np.arange(rank, samples, num_replicas)
        self.micro_batch_size = batch_size

    def __iter__(self) -> Iterator[BatchKey]:
        for start in range(0, len(self._indices), self.micro_batch_size):
            yield BatchKey(0, self._indices[start : start + self.micro_batch_size])

    def __len__(self) -> int:
        return -(-len(self._indices) // self.micro_batch_size)
