"""A model and a data set of one's own for ddp.train, started in the folder of this file.

torchrun --nproc_per_node=2 -m ddp.train --model own_model_and_dataset:build --dataset own_model_and_dataset:load
"""

import numpy as np
import numpy.typing as npt
from torch import nn

Half = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
CLASSES = ("horizontal", "vertical")


def build(shape: tuple[int, int, int], classes: int) -> nn.Module:
    """A model for float images [n, *shape]; it returns logits [n, classes]."""
    channels, _, _ = shape
    features = nn.Sequential(nn.Conv2d(channels, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(16 * 4 * 4, classes))


def load() -> tuple[Half, Half, tuple[str, ...]]:
    """Training half, test half, class names. A half may also be a torch Dataset of (image, label)."""
    return draw(2000, seed=0), draw(400, seed=1), CLASSES


def draw(count: int, seed: int) -> Half:
    """Noisy stripes: images uint8 [count, 1, 16, 16] and labels int64 [count]."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 2, count)
    stripes = np.sin(np.arange(16) + generator.uniform(0, 6, (count, 1)))
    images = np.where(labels[:, None, None] == 0, stripes[:, :, None], stripes[:, None, :])
    noisy = 128 + 40 * images + generator.normal(0, 40, (count, 16, 16))
    return noisy.clip(0, 255).astype(np.uint8)[:, None], labels
