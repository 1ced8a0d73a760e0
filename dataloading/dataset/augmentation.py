"""Augmentation of one image at a time, as a pure function of (seed, epoch, sample).

The draws are made for a whole batch at once, since numpy's cost is per call; what they do to an image is Pillow's work. A
sample thus looks the same in the same epoch, whichever loader, thread or worker fetches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageFilter

from common.training.randomness import uniform

AUGMENTATIONS = ("none", "affine", "heavy")

# The course's RandomAffine(5, (0.1, 0.1), (0.5, 2.0)).
DEGREES, TRANSLATE, SCALE = 5.0, (0.1, 0.1), (0.5, 2.0)
_DRAWS = {"none": 0, "affine": 4, "heavy": 9}

Draws = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ImageAugmentation:
    """What happens to an image.

    :param name: ``none``; ``affine``: a small rotation and shift and a large change of scale; ``heavy``: the same with
        bilinear interpolation, a mirror image half of the time, changed brightness, contrast and saturation, and a blur
    """

    name: str = "none"

    def __bool__(self) -> bool:
        return self.name != "none"

    def draw(self, seed: int, epoch: int, samples: npt.NDArray[np.int64]) -> Draws:
        """What chance decides for each sample: float32 ``[n, draws]`` in [0, 1)."""
        return uniform(_DRAWS[self.name], seed, "image-augmentation", epoch, samples)

    def __call__(self, image: Image.Image, draws: Draws) -> Image.Image:
        """The image as one row of :meth:`draw` wants it; of the same size and mode."""
        if self.name == "none":
            return image
        heavy = self.name == "heavy"
        matrix = affine_matrix(image.size, draws[:4].tolist())
        resampling = Image.Resampling.BILINEAR if heavy else Image.Resampling.NEAREST
        image = image.transform(image.size, Image.Transform.AFFINE, matrix, resampling)
        return _recolor(image, draws[4:].tolist()) if heavy else image


def affine_matrix(size: tuple[int, int], draws: list[float]) -> tuple[float, ...]:
    """The way back from a pixel of the result to one of the source, for ``Image.transform``: as
    ``torchvision.transforms.functional.affine`` has it for the same angle, shift and scale, about the image's centre.

    :param size: width and height
    :param draws: four from [0, 1): angle, shift to the right, shift down, scale
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

    Its ``affine`` has the distribution of ours, not its draws: those depend on the worker and on what it drew before.
    """
    from torchvision import transforms

    steps: dict[str, list[Any]] = {
        "none": [],
        "affine": [transforms.RandomAffine(DEGREES, TRANSLATE, SCALE)],
        "heavy": [
            transforms.RandomAffine(DEGREES, TRANSLATE, SCALE, interpolation=transforms.InterpolationMode.BILINEAR),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3),
            transforms.RandomApply([transforms.GaussianBlur(5, (0.1, 2.0))]),
        ],
    }
    return transforms.Compose([*steps[name], transforms.ToTensor()])


def _recolor(image: Image.Image, draws: list[float]) -> Image.Image:
    mirrored, brightness, contrast, saturation, blur = draws
    if mirrored < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Brightness(image).enhance(_between(0.7, 1.3, brightness))
    image = ImageEnhance.Contrast(image).enhance(_between(0.7, 1.3, contrast))
    image = ImageEnhance.Color(image).enhance(_between(0.7, 1.3, saturation))
    return image.filter(ImageFilter.GaussianBlur(2 * blur)) if blur < 0.5 else image


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
