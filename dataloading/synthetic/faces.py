"""Drawn faces: images with the size, the file sizes and the long tail of Labeled Faces in the Wild, without its photographs.

The person fixes the colors and the features of a face. Each image varies the place, the zoom, the light, the expression and the
background. A camera's noise makes the files as large as photographs are. Every random number is a function of (seed, person,
image), so a face does not depend on how many others are drawn, or in which order.

:mod:`dataloading.synthetic.face_cache` writes the faces to a folder.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageDraw

from common.randomness import derive_seed

SIDE = 250  # pixels of an image's side, as in LFW
QUALITY = 75


def draw(person: int, image: int, seed: int = 0) -> Image.Image:
    """Draw one image of a person.

    :param person: its number, from 0 without an end
    :param image: the number of the image, from 0 without an end
    :param seed: another seed gives other people
    :returns: RGB, 250x250
    """
    features = np.random.default_rng(derive_seed(seed, "faces-person", person))
    varied = np.random.default_rng(derive_seed(seed, "faces", person, image))
    spots = varied.integers(60, 180, (4, 4, 3), np.uint8)
    picture = Image.fromarray(spots).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    canvas = ImageDraw.Draw(picture)
    hair, iris = features.integers(10, 150, (2, 3)).tolist()
    tone = features.uniform(90, 240) * np.array([1, 0.75, 0.6])
    skin, shadow, lips = tone.astype(int).tolist(), (0.8 * tone).astype(int).tolist(), [180, 60, 70]
    width, height, gap, eye, nose, mouth = features.uniform((40, 55, 16, 6, 4, 12), (60, 75, 28, 12, 10, 26)).tolist()
    x, y, zoom, gaze, gape = varied.uniform((100, 105, 0.9, -4, 2), (150, 145, 1.5, 4, 12)).tolist()

    def oval(right: float, down: float, half_width: float, half_height: float, color: list[int]) -> None:
        """An ellipse whose center lies so far right of and below the head's."""
        left, top = x + zoom * (right - half_width), y + zoom * (down - half_height)
        canvas.ellipse((left, top, left + 2 * zoom * half_width, top + 2 * zoom * half_height), fill=tuple(color))

    oval(0, -12, width + 14, height + 12, hair)
    oval(0, 0, width, height, skin)
    for side in (-1, 1):
        oval(side * gap, -10, eye, 0.6 * eye, [240, 238, 232])
        oval(side * gap + gaze, -10, 0.5 * eye, 0.5 * eye, iris)
    oval(0, 10, nose, 2 * nose, shadow)
    oval(0, 40, mouth, gape, lips)
    above, below = varied.uniform(0.6, 1.2, 2).tolist()
    light = np.linspace(above, below, SIDE)
    noise = varied.normal(0, varied.uniform(2.7, 6.2), (SIDE, SIDE))
    pixels = np.asarray(picture) * light[:, None] + noise[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encode(image: Image.Image) -> bytes:
    """The image as a JPEG file like LFW's: baseline, quality 75, colors at half the resolution."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()
