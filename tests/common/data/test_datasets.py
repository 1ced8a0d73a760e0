"""``common.data.datasets``: what is loaded, what a fetched batch holds, and a model's input against torchvision's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from common.data import fashion_mnist, glyphs
from common.data.datasets import (
    Augmentation,
    BatchKey,
    ImageData,
    ImageDataset,
    Images,
    fetch_batches,
    load,
)
from common.errors import UsageError

AUGMENTATION = Augmentation(shift=3, flip=True)

needs_debians_files = pytest.mark.skipif(
    not fashion_mnist.DEBIAN_FOLDER.is_dir(), reason="no Fashion-MNIST: apt-get install dataset-fashion-mnist"
)


def load_few(**settings: Any) -> ImageData:
    return load("glyphs", **({"train_samples": 60, "test_samples": 20} | settings))


def in_memory(half: Images) -> ImageDataset:
    assert isinstance(half, ImageDataset)
    return half


def key(*samples: int, epoch: int = 0) -> BatchKey:
    return BatchKey(epoch, np.array(samples, np.int64))


def test_a_limit_takes_the_first_samples() -> None:
    data = load_few()
    for half, split, count in ((data.train, "train", 60), (data.test, "test", 20)):
        images, labels = glyphs.render(split, count)
        np.testing.assert_array_equal(in_memory(half).images, images[:, None])
        np.testing.assert_array_equal(half.labels, labels)


@pytest.mark.parametrize(
    "name, split, available",
    [
        ("glyphs", "train", "12,000"),
        pytest.param("fashion-mnist", "test", "10,000", marks=needs_debians_files),
    ],
)
def test_more_samples_than_there_are_is_refused(name: str, split: str, available: str) -> None:
    limit = int(available.replace(",", "")) + 1
    limits = {"train_samples": 1, f"{split}_samples": limit}
    with pytest.raises(UsageError, match=f"^--{split}-samples {limit} is more than the {available} that {name} has$"):
        load(name, None if name == "glyphs" else fashion_mnist.DEBIAN_FOLDER, **limits)  # type: ignore[arg-type]


@needs_debians_files
def test_fashion_mnist_has_the_mean_and_standard_deviation_that_are_published() -> None:
    data = load("fashion-mnist", fashion_mnist.DEBIAN_FOLDER)
    assert (len(data.train), len(data.test), data.shape) == (60_000, 10_000, (1, 28, 28))
    assert data.mean == pytest.approx(0.2860, abs=5e-5)
    assert data.std == pytest.approx(0.3530, abs=5e-5)


def test_the_fingerprint_tells_different_data_apart() -> None:
    fingerprints = {load_few(**few).fingerprint for few in ({}, {"train_samples": 61}, {"test_samples": 21})}
    assert len(fingerprints) == 3


@given(
    mean=st.floats(0, 1),
    std=st.floats(0.01, 1),
    channels=st.integers(1, 3),
    seed=st.integers(0, 1000),
    channels_last=st.booleans(),
)
def test_to_input_is_torchvisions_normalize(
    mean: float, std: float, channels: int, seed: int, channels_last: bool
) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (4, channels, 5, 6), np.uint8)
    half = ImageDataset(images, np.zeros(4, np.int64))
    data = ImageData("noise", half, half, ("one",), mean, std, "")
    given_images = torch.from_numpy(images.copy())
    memory_format = torch.channels_last if channels_last else torch.contiguous_format

    result = data.to_input(given_images, memory_format)

    normalize = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([mean] * channels, [std] * channels)])
    torch.testing.assert_close(result, normalize(torch.from_numpy(images)), rtol=1e-5, atol=1e-5 / std)
    assert result.is_contiguous(memory_format=memory_format)
    np.testing.assert_array_equal(given_images, images)


@given(st.lists(st.integers(0, 19), max_size=30))
def test_a_batch_holds_the_samples_asked_for_in_that_order(samples: list[int]) -> None:
    dataset = ImageDataset(np.arange(20 * 12, dtype=np.uint8).reshape(20, 1, 3, 4), np.arange(20))
    batch = dataset.__getitems__(key(*samples))
    assert (batch.images.dtype, batch.labels.dtype) == (torch.uint8, torch.int64)
    np.testing.assert_array_equal(batch.images, dataset.images[samples] if samples else np.empty((0, 1, 3, 4)))
    assert batch.labels.tolist() == samples


@given(st.lists(st.integers(0, 59), max_size=30), st.integers(1, 9), st.integers(0, 2))
def test_batches_cut_an_order_into_pieces(samples: list[int], batch_size: int, epoch: int) -> None:
    images = load_few(augmentation=AUGMENTATION).train
    pieces = list(fetch_batches(images, np.array(samples, np.int64), batch_size, epoch))
    assert [len(piece.labels) for piece in pieces[:-1]] == [batch_size] * (len(pieces) - 1)
    assert [label for piece in pieces for label in piece.labels.tolist()] == images.labels[samples].tolist()
    if pieces:
        whole = images.__getitems__(key(*samples, epoch=epoch))
        assert torch.equal(torch.cat([piece.images for piece in pieces]), whole.images)


def test_writing_to_a_batch_leaves_the_data_set_alone() -> None:
    dataset = in_memory(load_few().train)
    before = dataset.images.copy(), dataset.labels.copy()
    batch = dataset.__getitems__(key(0, 1))
    batch.images.fill_(7)
    batch.labels.fill_(7)
    np.testing.assert_array_equal(dataset.images, before[0])
    np.testing.assert_array_equal(dataset.labels, before[1])
