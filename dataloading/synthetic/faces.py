"""Drawn faces: a data set with the layout, the long tail and the file sizes of Labeled Faces in the Wild, without its photographs.

The person fixes the features: the head's shape, skin, hair, eyes, brows, nose, mouth, beard, glasses. Each image varies the
pose, the light, the expression, the clothes and the background, which do not reveal the person. Pillow draws some twenty flat
shapes; one affine map turns and moves them; numpy lights them and adds a camera's noise. Every random number is a function of
(seed, person, image), so a face does not depend on how many others are drawn, or in which order.

:mod:`dataloading.synthetic.face_cache` writes the faces to a folder.
"""

from __future__ import annotations

import functools
import io
import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from common.randomness import hash64, uniform

SIDE = 250  # pixels of an image's side, as in LFW
QUALITY = 75
_CANVAS = 400  # the flat figure's side; the head is in its middle
_SKINS = ((240, 205, 176), (214, 162, 122), (160, 108, 74), (96, 64, 46))
_HAIRS = ((26, 22, 24), (74, 46, 30), (132, 76, 42), (206, 164, 98), (176, 174, 172))
_BLACK, _WHITE = (30, 26, 28), (240, 238, 232)

Colour = tuple[int, ...]


def draw(person: int, image: int, seed: int = 0) -> Image.Image:
    """Draw one image of a person.

    :param person: its number, from 0 without an end
    :param image: the number of the image, from 0 without an end
    :param seed: another seed gives other people
    :returns: RGB, 250x250
    """
    key = seed, "faces", person, image
    tilt, zoom, right, down = (2 * uniform(4, *key, "pose") - 1).tolist()
    figure = _figure(uniform(19, seed, "faces-person", person).tolist(), uniform(8, *key, "expression").tolist())
    angle, scale = 0.3 * tilt, 1.2 + 0.3 * zoom
    along, across = scale * math.cos(angle), scale * math.sin(angle)
    x, y = SIDE / 2 + 28 * right, SIDE / 2 + 22 * down  # where the head's centre appears
    pose = along, across, _CANVAS / 2 - along * x - across * y, -across, along, _CANVAS / 2 + across * x - along * y
    figure = figure.transform((SIDE, SIDE), Image.Transform.AFFINE, pose, Image.Resampling.BILINEAR)
    spots = 60 + 120 * uniform(4 * 4 * 3, *key, "background").reshape(4, 4, 3)
    picture = Image.fromarray(spots.astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    picture.paste(figure, mask=figure)
    return _lit(picture, *uniform(5, *key, "light").tolist())


def _figure(person: list[float], expression: list[float]) -> Image.Image:
    """The flat figure, RGBA.

    :param person: nineteen draws from [0, 1), which all images of the person share
    :param expression: eight, which they do not
    """
    skin, hair, iris = _between(_SKINS, person[0]), _between(_HAIRS, person[1]), _between(_HAIRS, person[2])
    width, height, fringe, parting, volume, length, gap, eye, brow, nose, nostrils, mouth, lips, jaw, beard, glasses = (
        person[3:]
    )
    turn, gaze, smile, gape, lid, *clothes = expression
    shadow, back = _between((skin, _BLACK), 0.25), _between((hair, _BLACK), 0.25)
    red = _between((skin, (178, 50, 62)), 0.2 + 0.7 * lips)
    image = Image.new("RGBA", (_CANVAS, _CANVAS))
    canvas = ImageDraw.Draw(image)

    def box(x: float, y: float, half_width: float, half_height: float) -> tuple[float, float, float, float]:
        """The box around a point to the right of and below the head's centre, in pixels of the canvas."""
        x, y = x + _CANVAS / 2, y + _CANVAS / 2
        return x - half_width, y - half_height, x + half_width, y + half_height

    def oval(x: float, y: float, half_width: float, half_height: float, colour: Colour) -> None:
        canvas.ellipse(box(x, y, half_width, half_height), fill=colour)

    shift = 50 * (turn - 0.5)  # how far the features move when the head turns
    wide, high, crown = 66 + 24 * width, 92 + 24 * height, 74 + 24 * width + 26 * volume
    oval(
        -0.2 * shift, 50 * length, crown - 20, 60 + 90 * length, back
    )  # long hair beside the neck, short hair behind it
    oval(0, 235, 150, 110, tuple(int(40 + 180 * colour) for colour in clothes))
    canvas.rectangle(box(0, 92, 32, 42), fill=shadow)
    oval(-0.3 * shift, -30, crown, high + 14 * volume - 20, hair)
    for side in (-1, 1):
        oval(side * wide - 0.4 * shift, 4, 12, 20, shadow)
    oval(0, 0, wide, high, skin)
    oval(0.3 * shift, 30, (0.7 + 0.3 * jaw) * wide, high - 22, skin)
    middle, half_angle = 250 + 40 * parting, 25 + 40 * fringe
    canvas.chord(box(0, 0, wide, high), middle - half_angle, middle + half_angle, fill=hair)
    if beard > 0.65:
        oval(shift, 72, 30 + 20 * jaw, 34, back)
    for side in (-1, 1):
        x, half = shift + side * (26 + 12 * gap), 11 + 7 * eye
        oval(x, -8, half, half * (0.3 + 0.4 * lid), _WHITE)
        oval(x + 6 * (gaze - 0.5), -8, 0.5 * half, half * (0.3 + 0.2 * lid), iris)
        oval(x + 6 * (gaze - 0.5), -8, 0.2 * half, 0.2 * half, _BLACK)
        canvas.arc(box(x, -14, 1.5 * half, 16), 200, 340, fill=back, width=3 + int(9 * brow))
        if glasses > 0.65:
            canvas.rounded_rectangle(box(x, -6, 28, 21), 60 * glasses - 35, outline=_BLACK, width=4)
    oval(1.3 * shift, 18 + 12 * nose, 7 + 8 * nostrils, 18 + 10 * nose, shadow)
    oval(1.2 * shift, 12 + 12 * nose, 7 + 6 * nostrils, 18 + 10 * nose, skin)
    half, thick = 20 + 16 * mouth, 5 + 6 * lips
    oval(shift, 66, half, thick + 8 * gape, red)
    oval(shift, 66, 0.8 * half, 8 * gape, _BLACK)
    oval(shift, 61 - 9 * smile, half, 6 + 2 * smile, back if beard > 0.85 else skin)  # a smile, or a moustache
    return image


def _lit(image: Image.Image, side: float, light: float, noise: float, left: float, top: float) -> Image.Image:
    """The picture with light from one side, and a camera's noise; every number is a draw from [0, 1)."""
    shade = (0.55 + 0.6 * light) * (1 + (side - 0.5) * np.linspace(-1, 1, SIDE, dtype=np.float32))
    x, y = int(SIDE * left), int(SIDE * top)
    grain = (2.6 + 3.6 * noise) * _grain()[y : y + SIDE, x : x + SIDE]
    pixels = np.asarray(image, np.float32) * shade[:, None] + grain[..., None]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encode(image: Image.Image) -> bytes:
    """The image as a JPEG file like LFW's: baseline, quality 75, colours at half the resolution."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


def _between(colours: tuple[Colour, ...], position: float) -> Colour:
    """The colour at ``position`` in 0 ... 1 of the way along a row of RGB colours."""
    index, share = divmod(position * (len(colours) - 1), 1)
    pairs = zip(colours[int(index)], colours[min(int(index) + 1, len(colours) - 1)], strict=True)
    return tuple(int(first + (second - first) * share) for first, second in pairs)


@functools.cache
def _grain() -> npt.NDArray[np.float32]:
    """Noise of mean 0 and variance 1, larger than an image, so that each image uses another part; float32 [500, 500]."""
    bits = hash64("faces-grain", np.arange(4 * SIDE * SIDE)).view(np.uint8)
    white = bits.reshape(2 * SIDE, 2 * SIDE, 8).mean(axis=-1, dtype=np.float32) - np.float32(127.5)
    grain: npt.NDArray[np.float32] = white / white.std()
    return grain
