"""Pillow images of any mode as RGB of 8 bits a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image


class NoRange(Exception):
    """The pixels are 32-bit integers or floats: nothing says which value is white."""


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB. Grey of 16 bits keeps its upper eight, as Pillow does with 16-bit RGB; ``convert`` would clip it at 255.

    :raises NoRange: when nothing says which value is white
    """
    if image.mode in ("I", "F"):
        raise NoRange(f"pixels of Pillow's mode {image.mode} have no range: convert them to 8 bits first")
    if image.mode.startswith("I;16"):
        from PIL import Image

        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")
