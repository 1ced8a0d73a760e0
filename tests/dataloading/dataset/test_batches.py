"""``dataloading.dataset.batches``: the same images from every loader, the first error in order, and threads inside a worker."""

from __future__ import annotations

import pickle
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import PILToTensor

from common.data.datasets import BatchKey
from dataloading.dataset.batches import ImageBatches, ThreadedFetch
from dataloading.dataset.decoders import installed
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.sampler import SampleKey
from dataloading.dataset.storage import BadFile
from tests.dataloading.conftest import PICTURES
from tests.dataloading.faults import (
    BATCH_SIZE,
    DAMAGE,
    HEIGHT,
    LOADERS,
    WIDTH,
    error_in,
    load,
    order_of,
    save_picture,
)

# By default one loader meets every damage, and each other loader one damage in turn; the other pairs are slow.
LOADERS_AND_DAMAGE = [
    pytest.param(loader, damage, marks=() if loader == "fast" or i % len(DAMAGE) == j else pytest.mark.slow)
    for i, loader in enumerate(LOADERS)
    for j, damage in enumerate(DAMAGE)
]


def expected_samples(files: ImageFiles, epoch: int = 0) -> list[tuple[torch.Tensor, int]]:
    """An epoch's samples one by one, by the data set alone: uint8 ``[3, height, width]`` and label."""
    to_tensor, alone = PILToTensor(), plain(files)
    pairs = [alone[SampleKey(epoch, sample)] for sample in order_of(files, epoch)]
    return [(to_tensor(image), label) for image, label in pairs]


def plain(files: ImageFiles) -> ImageFiles:
    """The data set without what a loader has set."""
    other = pickle.loads(pickle.dumps(files))
    other.transform = None
    return other  # type: ignore[no-any-return]


def assert_batches(
    batches: list[tuple[torch.Tensor, torch.Tensor]], expected: list[tuple[torch.Tensor, int]], batch_size: int
) -> None:
    starts = range(0, len(expected), batch_size)
    assert len(batches) == len(starts)
    for (images, labels), start in zip(batches, starts, strict=True):
        wanted = expected[start : start + batch_size]
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert torch.equal(images, torch.stack([image for image, _ in wanted]))
        assert labels.tolist() == [label for _, label in wanted]


# The same from every loader


@pytest.mark.parametrize("augmentation", ["none", "affine"])
@pytest.mark.parametrize("loader", LOADERS)
def test_every_loader_gives_the_same_images_and_labels_in_the_same_order(
    pictures: Path, loader: str, augmentation: str
) -> None:
    """Every loader gives the same images and labels in the same order.

    Claim (dataloading/README.md, 6): every loader and decoder gives the same images.
    """
    files = ImageFiles(pictures, augmentation=augmentation, seed=7)
    for epoch in (0, 3):
        assert_batches(list(load(loader, files, epoch)), expected_samples(files, epoch), BATCH_SIZE)


@pytest.mark.parametrize("batch_size", [1, PICTURES + 1])
@pytest.mark.parametrize("loader", ["whole-batches-2", "fast", "fast-3-threads"])
def test_they_do_so_for_any_batch_size(pictures: Path, loader: str, batch_size: int) -> None:
    files = ImageFiles(pictures)
    assert_batches(list(load(loader, files, 1, batch_size)), expected_samples(files, 1), batch_size)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_plain_indices_are_augmented_in_another_way_in_each_epoch(pictures: Path, whole: bool, workers: int) -> None:
    files = ImageFiles(pictures, transform=None if whole else PILToTensor(), augmentation="affine")
    loader = DataLoader(ImageBatches(files) if whole else files, batch_size=PICTURES, num_workers=workers)
    torch.manual_seed(0)
    first, second = ([images for images, _ in loader] for _ in range(2))
    torch.manual_seed(0)
    again = [images for images, _ in loader]
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], again[0])


@pytest.mark.parametrize("decoder", installed())
@pytest.mark.parametrize("loader", ["stock", "fast-3-threads"])
def test_they_do_so_with_every_decoder(pictures: Path, loader: str, decoder: str) -> None:
    assert_batches(list(load(loader, ImageFiles(pictures, decoder=decoder))), expected_samples(ImageFiles(pictures)), 4)


@pytest.mark.parametrize("loader", ["stock-2", "fast-3-threads"])
def test_images_of_several_sizes_are_made_equal_by_all(own_pictures: Path, loader: str) -> None:
    save_picture(own_pictures / "Ann_Lee" / "Ann_Lee_0001.jpg", 0, size=(300, 200))
    files = ImageFiles(own_pictures, image_size=16)
    assert_batches(list(load(loader, files)), expected_samples(files), BATCH_SIZE)


def test_a_batch_lies_in_memory_as_it_was_decoded(pictures: Path) -> None:
    batch = ImageBatches(ImageFiles(pictures)).__getitems__(BatchKey(0, np.arange(4)))
    assert batch.images.shape == (4, 3, HEIGHT, WIDTH)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


# Files that cannot be read


@pytest.mark.parametrize(("loader", "damage"), LOADERS_AND_DAMAGE)
def test_a_bad_file_is_one_line_in_the_place_of_its_batch(own_pictures: Path, loader: str, damage: str) -> None:
    """A damaged file raises one line that names it, when its batch is due.

    Claim (dataloading/README.md, 8): a bad file is one line.
    """
    files = ImageFiles(own_pictures)
    order = order_of(files)
    expected = expected_samples(files)
    bad = next(place for place in range(9, PICTURES) if order[place] != 0)  # 0 tells every image's size
    path = Path(files.path(order[bad]))
    do, reason = DAMAGE[damage]
    do(path)
    batches = load(loader, files)
    good = bad // BATCH_SIZE
    assert_batches([next(batches) for _ in range(good)], expected[: good * BATCH_SIZE], BATCH_SIZE)
    message = error_in(batches)
    assert message.startswith(f"{path} {reason}")
    assert "\n" not in message


@pytest.mark.parametrize("loader", LOADERS)
def test_of_several_bad_files_the_first_in_order_is_told(own_pictures: Path, loader: str) -> None:
    files = ImageFiles(own_pictures)
    order = order_of(files)
    bad = [sample for sample in order[:6] if sample != 0]
    for sample in bad:
        Path(files.path(sample)).unlink()
    message = error_in(load(loader, files, batch_size=PICTURES))
    assert message.startswith(f"{files.path(bad[0])} cannot be opened")


@pytest.mark.parametrize("loader", ["stock", "stock-2", "stock-threaded-fetch"])
def test_images_of_several_sizes_are_one_line_with_what_to_do(own_pictures: Path, loader: str) -> None:
    save_picture(own_pictures / "Ann_Lee" / "Ann_Lee_0001.jpg", 0, size=(30, 31))
    message = error_in(load(loader, ImageFiles(own_pictures)))
    assert (
        message == "images of several sizes make no batch: (3, 20, 24) and (3, 31, 30); give image_size (--image-size)"
    )


@pytest.mark.parametrize("loader", ["whole-batches-2", "fast-3-threads"])
def test_an_image_of_another_size_is_named_with_what_to_do(own_pictures: Path, loader: str) -> None:
    files = ImageFiles(own_pictures)
    save_picture(Path(files.path(5)), 0, size=(30, 31))
    message = error_in(load(loader, files))
    assert re.fullmatch(f"{files.path(5)} has 30x31 pixels, .* give image_size \\(--image-size\\)", message)


# ThreadedFetch


class Meeting(Dataset[Any]):
    """Gives a sample only when ``together`` of them are being fetched at the same time."""

    def __init__(self, together: int) -> None:
        self._together = threading.Barrier(together)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, sample: int) -> int:
        self._together.wait(30)
        return sample


def test_a_batchs_samples_are_fetched_at_the_same_time_and_in_their_order() -> None:
    """A batch's samples are fetched at the same time and in their order.

    Claim (dataloading/README.md, 5): threads fetch at once, in order, with the first error kept.
    """
    fetch = ThreadedFetch(Meeting(4), threads=4)
    assert fetch.__getitems__([3, 1, 2, 0]) == [3, 1, 2, 0]
    assert fetch.__getitems__(list(range(12))) == list(range(12))


class Failing(Dataset[Any]):
    """Fails for all samples but 0, and for the later ones first."""

    def __init__(self) -> None:
        self.failed = {sample: threading.Event() for sample in range(5)}

    def __getitem__(self, sample: int) -> int:
        if sample == 0:
            return 0
        if sample + 1 in self.failed:
            assert self.failed[sample + 1].wait(30)
        self.failed[sample].set()
        raise BadFile(f"sample {sample}")


def test_the_first_error_in_the_batchs_order_is_raised_though_another_came_before() -> None:
    """The first error in the batch's order is raised though another came before.

    Claim (dataloading/README.md, 5): threads fetch at once, in order, with the first error kept.
    """
    fetch = ThreadedFetch(Failing(), threads=5)
    with pytest.raises(BadFile, match=r"^sample 1$"):
        fetch.__getitems__([0, 1, 2, 3, 4])


# ImageBatches


def test_a_part_of_a_batch_fills_its_places_only(pictures: Path) -> None:
    dataset = ImageBatches(ImageFiles(pictures))
    buffer = np.full((5, HEIGHT, WIDTH, 3), 77, np.uint8)
    key = BatchKey(0, np.array([4, 3, 2, 1, 0]))
    dataset.fill(buffer, key, 1, 3)
    assert (buffer[[0, 3, 4]] == 77).all()
    np.testing.assert_array_equal(buffer[1], dataset.files[3][0])
    np.testing.assert_array_equal(buffer[2], dataset.files[2][0])
