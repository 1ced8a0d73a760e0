"""The embedded data set: ten characters, rendered here. It needs no download and is not easy to learn.

Each image is drawn from Pillow's bundled scalable font under a random rotation, shear, scale and shift, with a random
stroke width, contrast, clutter (line segments and a piece of another character) and noise. Every draw is a function of
(split, sample), so image ``i`` is the same on every machine, however many are made.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from common.randomness import hash64, integers, uniform

CLASSES = "23589BEKRS"  # pairs that differ by a stroke: 3 and 8, 8 and B, 5 and S, K and R
SIDE = 28
SAMPLES = {"train": 12_000, "test": 2_000}
SEED = 0  # another one would be another data set
BACKGROUND = 50  # the paper's mean grey

_MASTER_SIDE = 64
_MASTER_FONT_SIZE = 44
_STROKE_WIDTHS = 3
_CLUTTER_LINES = 2


def render(split: str, count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Draw the first ``count`` samples of a split.

    :param split: ``"train"`` or ``"test"``: two independent streams of the same distribution
    :returns: images uint8 ``[count, 28, 28]`` and labels int64 ``[count]``, the index into :data:`CLASSES`
    """
    samples = np.arange(count)
    key = (SEED, f"glyphs-{split}", samples)
    labels = integers(1, 0, len(CLASSES) - 1, *key, "label")[:, 0]
    strokes = integers(2, 0, _STROKE_WIDTHS - 1, *key, "stroke")
    geometry = uniform(6, *key, "geometry").tolist()
    neighbours = integers(1, 0, len(CLASSES) - 1, *key, "neighbour")[:, 0]
    neighbour_geometry = uniform(6, *key, "neighbour-geometry").tolist()
    lines = uniform(6 * _CLUTTER_LINES, *key, "lines").tolist()

    ink = np.empty((count, SIDE, SIDE), np.float32)
    clutter = np.empty_like(ink)
    for i in range(count):
        ink[i] = np.asarray(_draw_character(labels[i], strokes[i, 0], geometry[i]))
        clutter[i] = np.asarray(_draw_clutter(neighbours[i], strokes[i, 1], neighbour_geometry[i], lines[i]))

    paper, contrast, clutter_strength, noise_strength = np.moveaxis(uniform(4, *key, "tone"), 1, 0)[..., None, None]
    paper = 20 + 60 * paper
    contrast = 70 + 100 * contrast
    grey = paper + contrast * np.maximum(ink, (0.35 + 0.4 * clutter_strength) * clutter) / 255
    grey += (12 + 20 * noise_strength) * _noise(split, samples)
    return np.clip(np.rint(grey), 0, 255).astype(np.uint8), labels


def _draw_character(label: int, stroke: int, draws: list[float]) -> Image.Image:
    angle, *shape, right, down = draws
    return _transform(_master(label, stroke), 50 * angle - 25, *shape, right=8 * right - 4, down=8 * down - 4)


def _draw_clutter(label: int, stroke: int, draws: list[float], lines: list[float]) -> Image.Image:
    """A neighbouring character that reaches in from outside, and line segments across the image."""
    direction, angle, *shape, distance = draws
    direction, distance = 2 * math.pi * direction, 17 + 4 * distance
    right, down = distance * math.cos(direction), distance * math.sin(direction)
    image = _transform(_master(label, stroke), 90 * angle - 45, *shape, right=right, down=down)
    canvas = ImageDraw.Draw(image)
    for i in range(0, len(lines), 6):
        x, y, direction, length, width, level = lines[i : i + 6]
        x, y, direction, length = SIDE * x, SIDE * y, 2 * math.pi * direction, 4 + 12 * length
        end = x + length * math.cos(direction), y + length * math.sin(direction)
        canvas.line(((x, y), end), fill=round(120 + 135 * level), width=1 + round(width))
    return image


def _transform(
    master: Image.Image, degrees: float, shear: float, stretch: float, scale: float, *, right: float, down: float
) -> Image.Image:
    """Place a master on a 28x28 canvas. Pillow takes the inverse map: from a pixel of the result to one of the source.

    :param degrees: of the rotation
    :param shear, stretch, scale: draws from [0, 1)
    """
    angle, shear, stretch, scale = math.radians(degrees), 0.6 * shear - 0.3, 0.75 + 0.5 * stretch, 0.36 + 0.2 * scale
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    a, b = (cos + shear * sin) / stretch, (sin - shear * cos) / stretch
    d, e = -sin, cos
    x, y = SIDE / 2 + right, SIDE / 2 + down  # the result's point that shows the master's centre
    centre = _MASTER_SIDE / 2
    coefficients = (a, b, centre - a * x - b * y, d, e, centre - d * x - e * y)
    return master.transform((SIDE, SIDE), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)


@functools.cache
def _master(label: int, stroke: int) -> Image.Image:
    """One character, large and upright in the middle of its canvas, 8-bit grey."""
    image = Image.new("L", (_MASTER_SIDE, _MASTER_SIDE))
    font = ImageFont.load_default(_MASTER_FONT_SIZE)
    centre = _MASTER_SIDE / 2, _MASTER_SIDE / 2
    ImageDraw.Draw(image).text(centre, CLASSES[label], fill=255, font=font, anchor="mm", stroke_width=stroke)
    return image


def _noise(split: str, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Nearly normal noise of mean 0 and variance 1: the sum of the eight bytes of each pixel's hash.

    Sums of bytes are exact, so the noise is the same on every machine. The logarithms of a normal variate would differ.
    """
    pixels = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    bits = hash64(SEED, f"glyphs-{split}-noise", samples[:, None, None], pixels)
    total = bits.view(np.uint8).reshape(*bits.shape, 8).sum(axis=-1, dtype=np.float32)
    standard_deviation = math.sqrt(8 * (256**2 - 1) / 12)
    centred: npt.NDArray[np.float32] = total - np.float32(8 * 127.5)
    return centred / np.float32(standard_deviation)
