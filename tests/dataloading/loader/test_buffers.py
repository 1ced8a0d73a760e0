"""``dataloading.loader.buffers``: memory is reused when no reference to it is left, and not before."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from dataloading.loader.buffers import BufferPool, allocator, private, shared
from tests.dataloading.faults import Traces
from tests.support.fake_gpu import CUDA, FakeGpu

SHAPE = (4, 5, 3)


def pool(keep: int = 2) -> BufferPool:
    return BufferPool(SHAPE, keep, private)


def tensor(buffers: BufferPool, images: int = 8) -> torch.Tensor:
    """A batch, of which the pool's memory is the only owner beside the caller."""
    return torch.from_numpy(buffers.take(images).pixels)


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


def test_larger_batches_take_the_place_of_smaller_memory() -> None:
    buffers = pool(keep=2)
    small = [buffers.take(1), buffers.take(1)]
    del small
    large = [buffers.take(8), buffers.take(8)]
    numbers = {handle.number for handle in large}
    del large
    assert {handle.number for handle in [buffers.take(8), buffers.take(8)]} == numbers


def test_only_so_much_unused_memory_is_kept() -> None:
    buffers = pool(keep=2)
    handles = [buffers.take(8) for _ in range(5)]
    numbers = {handle.number for handle in handles}
    handles.clear()
    again = [buffers.take(8).number, *(handle.number for handle in [buffers.take(8) for _ in range(5)])]
    assert len(numbers & set(again)) == 2


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


def test_shared_memory_has_no_name_and_goes_with_its_tensor() -> None:
    before = Traces()
    memory = shared((100, *SHAPE))
    assert memory.is_shared()
    assert (memory.shape, memory.dtype) == ((100, *SHAPE), torch.uint8)
    during = Traces()
    assert during.shared_files == before.shared_files
    assert len(during.shared_maps) == len(before.shared_maps) + 1
    assert "(deleted)" in during.shared_maps[-1]
    del memory
    assert Traces() == before


def test_shared_memory_that_is_full_is_one_line_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    with pytest.raises(UsageError) as full:
        shared((512, 250, 250, 3))
    message = str(full.value)
    assert message.startswith("shared memory (/dev/shm) is full: its batches need 96.0 MB and 0.0 MB are left; ")
    assert all(way in message for way in ("--shm-size", "--batch-size", "--workers", "threads"))
    assert "\n" not in message


def test_shared_memory_that_cannot_be_made_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: torch.UntypedStorage) -> None:
        raise RuntimeError("unable to open shared memory object\nException raised from THMapAlloc\nframe #0")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    with pytest.raises(UsageError, match=r"^shared memory .* \(unable to open shared memory object\)$"):
        shared((2, *SHAPE))


def test_shared_memory_does_not_depend_on_the_sharing_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared by name, as "file_system" has it, asking for the descriptor would move it elsewhere."""
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", "file_system")
    memory = shared((2, *SHAPE))
    address = memory.data_ptr()
    memory.untyped_storage()._share_fd_cpu_()
    assert memory.data_ptr() == address


def test_a_gpu_s_buffers_are_locked_until_the_last_batch_on_them_is_gone(fake_gpu: FakeGpu) -> None:
    """A GPU's buffers stay pinned until the last batch on them is gone.

    Claim (dataloading/README.md, 6): shared memory is pinned, and unpinned before it is unmapped.
    """
    buffers = BufferPool(SHAPE, 1, allocator(in_processes=True, device=CUDA))
    kept, dropped = tensor(buffers), tensor(buffers)
    addresses = {kept.data_ptr(), dropped.data_ptr()}
    assert set(fake_gpu.locked) == addresses
    view = kept[2:, 1]
    del kept, buffers
    gc.collect()
    assert set(fake_gpu.locked) == addresses
    del dropped, view
    gc.collect()
    assert not fake_gpu.locked


@pytest.mark.gpu
@pytest.mark.parametrize("in_processes", [False, True])
def test_a_gpu_s_buffers_are_page_locked(in_processes: bool) -> None:
    buffers = BufferPool(SHAPE, 1, allocator(in_processes, CUDA))
    batch = tensor(buffers)
    assert batch.is_pinned() and batch[1:].is_pinned()
    batch.fill_(3)
    assert (batch.to(CUDA, non_blocking=True).cpu() == 3).all()
