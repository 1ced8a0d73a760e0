"""Augmentation of one image at a time, as a pure function of (seed, epoch, sample).

The random numbers are drawn for a whole batch at once, since numpy's cost is per call. Pillow applies them to each image. A
sample thus looks the same in the same epoch, whichever loader, thread or worker fetches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from common.randomness import uniform

if TYPE_CHECKING:
    from PIL import Image

AUGMENTATIONS = ("none", "affine")

# The course's RandomAffine(5, (0.1, 0.1), (0.5, 2.0)).
DEGREES, TRANSLATE, SCALE = 5.0, (0.1, 0.1), (0.5, 2.0)

Draws = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ImageAugmentation:
    """The augmentation of one image.

    :param name: ``none``; ``affine``: a small rotation and shift and a large change of scale
    :raises ValueError: for another name
    """

    name: str = "none"

    def __post_init__(self) -> None:
        if self.name not in AUGMENTATIONS:
            raise ValueError(f"there is no augmentation {self.name!r} (--augmentation): {', '.join(AUGMENTATIONS)}")

    def __bool__(self) -> bool:
        return self.name != "none"

    def draw(self, seed: int, epoch: int, samples: npt.NDArray[np.int64]) -> Draws:
        """The random numbers of each sample: float32 ``[n, 4]`` in [0, 1)."""
        return uniform(4, seed, "image-augmentation", epoch, samples)

    def __call__(self, image: Image.Image, draws: Draws) -> Image.Image:
        """Apply ``affine`` to an image, with one row of :meth:`draw`; size and mode stay."""
        from PIL import Image

        return image.transform(image.size, Image.Transform.AFFINE, affine_matrix(image.size, draws.tolist()))


def affine_matrix(size: tuple[int, int], draws: list[float]) -> tuple[float, ...]:
    """The map from a pixel of the result to one of the source, as ``Image.transform`` takes it.

    It follows ``torchvision.transforms.functional.affine`` for the same angle, shift and scale about the image's centre.

    :param size: width and height
    :param draws: four numbers in [0, 1): angle, shift to the right, shift down, scale
    """
    width, height = size
    angle = math.radians(_between(-DEGREES, DEGREES, draws[0]))
    right = round(_between(-TRANSLATE[0] * width, TRANSLATE[0] * width, draws[1]))
    down = round(_between(-TRANSLATE[1] * height, TRANSLATE[1] * height, draws[2]))
    scale = _between(*SCALE, draws[3])
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    x, y = width * 0.5, height * 0.5
    dx, dy = -x - right, -y - down
    return cos, sin, cos * dx + sin * dy + x, -sin, cos, -sin * dx + cos * dy + y


def course_transform(name: str) -> Any:
    """The pipeline that courses teach, with torchvision's own random numbers: augmentation, then ``ToTensor``.

    ``affine`` has the same distribution here as in :class:`ImageAugmentation`, but its numbers depend on the worker and on
    its earlier draws.
    """
    from torchvision import transforms

    affine = [transforms.RandomAffine(DEGREES, TRANSLATE, SCALE)] if name == "affine" else []
    return transforms.Compose([*affine, transforms.ToTensor()])


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
