"""``dataloading.dataset.augmentation``: torchvision's geometry, and draws that belong to (seed, epoch, sample) alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional

from dataloading.dataset.augmentation import (
    DEGREES,
    SCALE,
    TRANSLATE,
    ImageAugmentation,
    course_transform,
)

below_one = st.floats(0, 1, width=32, exclude_max=True)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def samples(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def numbers_of(draws: np.ndarray[tuple[int, ...], np.dtype[np.float32]], width: int, height: int) -> list[float]:
    """Angle, shift to the right, shift down, and scale, of one row of draws."""
    angle, right, down, scale = (float(share) for share in draws[:4])
    low, high = SCALE
    return [
        -DEGREES + 2 * DEGREES * angle,
        round(-TRANSLATE[0] * width + 2 * TRANSLATE[0] * width * right),
        round(-TRANSLATE[1] * height + 2 * TRANSLATE[1] * height * down),
        low + (high - low) * scale,
    ]


@settings(max_examples=300)
@given(st.lists(below_one, min_size=4, max_size=4), st.integers(1, 60), st.integers(1, 60))
def test_affine_is_torchvisions_affine_with_the_same_numbers(shares: list[float], width: int, height: int) -> None:
    image, draws = noise(width, height), np.array(shares, np.float32)
    angle, right, down, scale = numbers_of(draws, width, height)
    expected = functional.affine(image, angle, [int(right), int(down)], scale, [0.0, 0.0])
    before = image.tobytes()
    np.testing.assert_array_equal(ImageAugmentation("affine")(image, draws), expected)
    assert image.tobytes() == before


@given(
    seed=st.integers(0, 1 << 40),
    epoch=st.integers(0, 1000),
    wanted=st.lists(st.integers(0, 1 << 40), max_size=20),
)
def test_draws_are_a_function_of_seed_epoch_and_sample_and_not_of_the_batch(
    seed: int, epoch: int, wanted: list[int]
) -> None:
    """Draws are a function of seed epoch and sample and not of the batch.

    Claim (dataloading/README.md, 7): augmentation is a function of seed, epoch and sample.
    """
    augmentation = ImageAugmentation("affine")
    together = augmentation.draw(seed, epoch, samples(*wanted))
    assert together.dtype == np.float32
    assert ((together >= 0) & (together < 1)).all()
    for sample, row in zip(wanted, together, strict=True):
        np.testing.assert_array_equal(augmentation.draw(seed, epoch, samples(sample))[0], row)


def test_another_seed_epoch_or_sample_has_other_draws() -> None:
    augmentation = ImageAugmentation("affine")
    rows = [
        augmentation.draw(seed, epoch, samples(sample))[0].tobytes()
        for seed in range(4)
        for epoch in range(4)
        for sample in range(4)
    ]
    assert len(set(rows)) == 64


def test_the_courses_transform_is_random_affine_and_to_tensor() -> None:
    affine, to_tensor = course_transform("affine").transforms
    assert repr(affine) == repr(transforms.RandomAffine(5, (0.1, 0.1), (0.5, 2.0)))
    assert isinstance(to_tensor, transforms.ToTensor)
    tensor = course_transform("none")(noise(4, 3))
    assert (tensor.dtype, tensor.shape) == (torch.float32, (3, 3, 4))
