"""``common.data.enlarged``: large images from small ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.datasets import Augmentation, BatchKey, load
from common.data.enlarged import enlarge


@pytest.mark.parametrize("factor", [1, 3])
def test_enlarged_images_are_the_augmented_ones_with_each_pixel_as_a_square(factor: int) -> None:
    plain = load("glyphs", train_samples=60, test_samples=20, augmentation=Augmentation(shift=3, flip=True), seed=3)
    side = 28 * factor
    large = enlarge(plain, side)
    assert (large.shape, large.test.shape, len(large.train)) == ((3, side, side), (3, side, side), 60)
    key = BatchKey(2, np.array([5, 0, 19]))
    for half in ("train", "test"):
        small, batch = (getattr(data, half).__getitems__(key) for data in (plain, large))
        assert batch.images.is_contiguous()
        for channel in range(3):
            squares = small.images[:, 0].repeat_interleave(factor, 1).repeat_interleave(factor, 2)
            assert torch.equal(batch.images[:, channel], squares)
        assert torch.equal(batch.labels, small.labels)
    assert np.array_equal(large.train.labels, plain.train.labels)
