"""``dataloading.loader.buffers``: memory is reused when no reference to it is left, and not before."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataloading.loader.buffers import BufferPool

SHAPE = (4, 5, 3)


def pool(keep: int = 2) -> BufferPool:
    return BufferPool(SHAPE, keep, pinned=False)


def tensor(buffers: BufferPool, images: int = 8) -> torch.Tensor:
    """A batch, of which the pool's memory is the only owner beside the caller."""
    return torch.from_numpy(buffers.take(images))


@pytest.mark.parametrize(
    "view",
    [
        lambda batch: batch[0],
        lambda batch: batch.permute(0, 3, 1, 2)[0, 1],
        lambda batch: batch.numpy()[1],
        lambda batch: batch.untyped_storage(),
        lambda batch: torch.utils.dlpack.from_dlpack(batch),
        lambda batch: memoryview(batch.numpy()),
    ],
)
def test_any_view_keeps_the_memory(view: object) -> None:
    assert callable(view)
    buffers = pool()
    batch = tensor(buffers)
    address = batch.data_ptr()
    seen = view(batch)
    del batch
    gc.collect()
    other = tensor(buffers)
    assert other.data_ptr() != address
    del seen
    gc.collect()
    assert tensor(buffers).data_ptr() == address


def test_a_smaller_batch_takes_a_part_of_larger_memory() -> None:
    buffers = pool()
    address = tensor(buffers, 8).data_ptr()
    last = tensor(buffers, 3)
    assert (last.data_ptr(), last.shape) == (address, (3, *SHAPE))


def addresses(batches: list[torch.Tensor]) -> set[int]:
    return {batch.data_ptr() for batch in batches}


def test_larger_batches_take_the_place_of_smaller_memory() -> None:
    buffers = pool(keep=2)
    small = [tensor(buffers, 1), tensor(buffers, 1)]
    del small
    large = [tensor(buffers, 8), tensor(buffers, 8)]
    first = addresses(large)
    large.clear()
    assert addresses([tensor(buffers, 8), tensor(buffers, 8)]) == first


def test_only_so_much_unused_memory_is_kept() -> None:
    buffers = pool(keep=2)
    batches = [tensor(buffers, 8) for _ in range(5)]
    batches.clear()
    assert len(buffers._free) == 2


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=30))
def test_what_is_kept_is_never_overwritten(steps: list[tuple[int, int]]) -> None:
    """Batches of any sizes, each kept for some steps: as long as it is kept, its content stays."""
    buffers = pool()
    kept: list[tuple[int, int, torch.Tensor]] = []
    for now, (images, lifetime) in enumerate(steps):
        batch = tensor(buffers, images)
        batch.fill_(now)
        kept = [(until, value, old) for until, value, old in kept if until > now] + [(now + lifetime, now, batch)]
        del batch
        assert all((old == value).all() for _, value, old in kept)


@pytest.mark.gpu
def test_a_gpu_s_buffers_are_pinned() -> None:
    batch = tensor(BufferPool(SHAPE, 1, pinned=True))
    assert batch.is_pinned() and batch[1:].is_pinned()
