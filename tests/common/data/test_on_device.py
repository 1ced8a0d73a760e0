"""``common.data.on_device``: batches of a data set that is kept on a device, and the order of copies, events and waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.data import on_device
from common.data.datasets import Augmentation, Batch, BatchKey, ImageDataset, load
from common.data.enlarged import EnlargedImages, enlarge
from common.data.on_device import ImagesOnDevice, copied_ahead, kept_on_device
from tests.support.fake_gpu import CUDA, FakeGpu

CPU = torch.device("cpu")


def images(shape: tuple[int, ...], augmentation: Augmentation, seed: int = 0) -> ImageDataset:
    draws = np.random.default_rng(seed)
    labels = draws.integers(0, 10, shape[0], np.int64)
    return ImageDataset(draws.integers(0, 256, shape, np.uint8), labels, augmentation, seed)


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    augmentation=st.builds(Augmentation, st.integers(0, 4), st.booleans(), st.integers(0, 255)),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 100),
    data=st.data(),
)
def test_a_kept_data_set_has_the_batches_of_the_one_in_memory(
    shape: tuple[int, ...], augmentation: Augmentation, seed: int, epoch: int, data: st.DataObject
) -> None:
    """A kept data set has the batches of the one in memory.

    Claim (dataloading/README.md, 6): a data set that is kept on a device has the batches of the one in memory, bit
    for bit.
    """
    in_memory = images(shape, augmentation, seed)
    kept = ImagesOnDevice(in_memory, CPU)
    samples = data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=12))
    key = BatchKey(epoch, np.array(samples, np.int64))
    for ours, expected in zip(kept.__getitems__(key), in_memory.__getitems__(key), strict=True):
        assert ours.dtype == expected.dtype and ours.is_contiguous()
        assert torch.equal(ours, expected)
    assert (len(kept), kept.shape) == (len(in_memory), in_memory.shape)
    assert np.array_equal(kept.labels, in_memory.labels)


def test_it_is_kept_where_a_gpu_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    half = images((10, 1, 8, 8), Augmentation())  # 640 bytes of images, 80 of labels
    monkeypatch.setattr(on_device, "ImagesOnDevice", lambda images, device: (images, device))
    for free, fits in ((7_200, True), (7_199, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 10**9))
        assert (kept_on_device(half, CUDA) is not half) == fits
    assert kept_on_device(half, CPU) is half
    enlarged = EnlargedImages(half, 16)
    assert kept_on_device(enlarged, CUDA) is enlarged  # still without room
    in_files: Any = SimpleNamespace()
    assert kept_on_device(in_files, CUDA) is in_files


def test_a_batch_is_copied_on_its_own_stream_and_its_memory_is_free_after_that(fake_gpu: FakeGpu) -> None:
    """A batch is copied on its own stream and its memory is free after that.

    Claim (dataloading/README.md, 6): copies to a GPU are queued and waited for by events, and no buffer is reused
    before its copy is over (a fake GPU, whose copies run late).
    """

    def made() -> Iterator[Batch]:
        memory = torch.empty(2, dtype=torch.uint8, pin_memory=True)
        for number in range(3):
            fake_gpu.log.append(f"batch {number} is made")
            memory.fill_(number)  # where the one before was
            yield Batch(memory, torch.full((2,), number))

    arrived = []
    for number, batch in enumerate(copied_ahead(made(), CUDA)):
        fake_gpu.log.append(f"step {number}")
        arrived.append(batch)
    of_one = [
        "batch {} is made", "copy on stream 1", "copy on stream 1", "the computing stream waits for stream 1",
        "in use on the computing stream", "in use on the computing stream", "step {}", "MainThread waits for stream 1",
    ]  # fmt: skip
    assert fake_gpu.log == [line.format(number) for number in range(3) for line in of_one]
    assert [batch.images.tolist() for batch in arrived] == [[0, 0], [1, 1], [2, 2]]


def test_a_copy_is_waited_for_however_the_epoch_ends(fake_gpu: FakeGpu) -> None:
    batches = copied_ahead(iter([Batch(torch.ones(2), torch.ones(2))] * 2), CUDA)
    next(batches)
    assert fake_gpu.log[-1] == "in use on the computing stream"
    del batches
    assert fake_gpu.log[-1] == "MainThread waits for stream 1"


@pytest.mark.gpu
def test_a_gpu_has_the_batches_of_the_cpu() -> None:
    data = enlarge(load("glyphs", train_samples=300, test_samples=20, augmentation=Augmentation(3, flip=True)), 56)
    kept: Any = kept_on_device(data.train, CUDA)
    assert isinstance(kept.small, ImagesOnDevice)
    for epoch in range(3):
        key = BatchKey(epoch, np.random.default_rng(epoch).permutation(300)[:144].astype(np.int64))
        expected, ours = data.train.__getitems__(key), kept.__getitems__(key)
        assert ours.images.device == ours.labels.device == CUDA
        assert torch.equal(ours.images.cpu(), expected.images) and torch.equal(ours.labels.cpu(), expected.labels)


@pytest.mark.gpu
def test_batches_arrive_whole_behind_a_busy_gpu() -> None:
    """The host's memory is used for every batch, and the device is some steps behind."""
    host = torch.empty(1 << 22, dtype=torch.uint8, pin_memory=True)

    def made() -> Iterator[Batch]:
        for number in range(20):
            host.fill_(number)
            yield Batch(host, torch.full((3,), number))

    sums_of_batches = []
    for batch in copied_ahead(made(), CUDA):
        torch.cuda._sleep(10_000_000)
        sums_of_batches.append(batch.images.long().sum() + batch.labels.sum())
    assert torch.stack(sums_of_batches).tolist() == [number * ((1 << 22) + 3) for number in range(20)]
