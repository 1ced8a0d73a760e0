"""``common.data.datasets`` against a pixel-by-pixel reference, and a sample's independence of its batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from common.data.datasets import Augmentation
from common.randomness import uniform

Pixels = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.int64]

augmentations = st.builds(Augmentation, st.integers(0, 4), st.booleans(), st.integers(0, 255))
shapes = st.tuples(st.integers(0, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6))
seeds = st.integers(0, 2**31)


def make_batch(shape: tuple[int, ...], seed: int) -> tuple[Pixels, Samples]:
    """Random images, and distinct indices for them in random order."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, shape, np.uint8)
    return images, generator.permutation(1000)[: shape[0]].astype(np.int64)


def naive(augmentation: Augmentation, image: Pixels, seed: int, epoch: int, sample: int) -> Pixels:
    """One image, pixel by pixel."""
    _, height, width = image.shape
    down, right, mirror = uniform(3, seed, "augmentation", epoch, sample).tolist()
    down = int(down * (2 * augmentation.shift + 1)) - augmentation.shift
    right = int(right * (2 * augmentation.shift + 1)) - augmentation.shift
    result = np.full_like(image, augmentation.fill)
    for y in range(height):
        for x in range(width):
            if 0 <= y + down < height and 0 <= x + right < width:
                x_out = width - 1 - x if augmentation.flip and mirror < 0.5 else x
                result[:, y, x_out] = image[:, y + down, x + right]
    return result


@given(augmentations, shapes, seeds, st.integers(0, 100))
def test_a_batch_is_augmented_as_a_naive_loop_over_images_and_pixels_would(
    augmentation: Augmentation, shape: tuple[int, ...], seed: int, epoch: int
) -> None:
    images, samples = make_batch(shape, seed)
    result = augmentation(images, seed, epoch, samples)
    assert result.shape == images.shape
    assert result.dtype == np.uint8
    for i, sample in enumerate(samples.tolist()):
        np.testing.assert_array_equal(result[i], naive(augmentation, images[i], seed, epoch, sample))
