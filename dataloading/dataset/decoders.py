"""From a JPEG file's bytes to pixels: Pillow, and simplejpeg, which is faster, where it is installed (extra ``fast``).

Both use libjpeg-turbo and give the same pixels. Pillow makes an image object with four bytes per pixel on the way; simplejpeg
writes RGB into a given buffer. Both release the GIL while they decode. They are imported on first use, so that ``--help`` stays
quick.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import util
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from common.data import DECODERS
from common.data.rgb import NoRange, to_rgb
from common.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image

Pixels = npt.NDArray[np.uint8]
Decoder = Callable[[bytes, Pixels | None], Pixels]

START = b"\xff\xd8\xff"  # of every JPEG file: the marker of an image's start, and that of its first segment
FRAME_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15, without tables
MOST_PIXELS = 89_478_485  # Pillow's own limit for a warning: 256 MB of RGB


class NotDecodable(Exception):
    """The bytes are not a complete JPEG image."""


def installed() -> tuple[str, ...]:
    """The decoders that can be used here, the fastest first."""
    return ("simplejpeg", "pillow") if util.find_spec("simplejpeg") else ("pillow",)


def get_decoder(name: str) -> Decoder:
    """The function ``decode(data, out)`` of a decoder.

    ``data`` is the content of a JPEG file: RGB, grey or CMYK. ``out`` is None, or uint8 ``[height, width, 3]``, C-contiguous,
    to decode into if the image has this size. ``decode`` returns uint8 ``[height, width, 3]``, RGB: ``out`` itself, or a new
    array if ``out`` is None or of another size. It raises :class:`NotDecodable` for an incomplete or other file.

    :param name: one of :data:`common.data.DECODERS`
    :raises UsageError: when there is no such decoder, or it is not installed
    """
    if name not in DECODERS:
        raise UsageError(f"there is no decoder {name!r} (--decoder): {', '.join(DECODERS)}")
    if name not in installed():
        raise UsageError(
            f"decoder {name} (--decoder) is not installed: pip install {name}, or use {' or '.join(installed())}"
        )
    return _decode_simplejpeg if name == "simplejpeg" else decode_pillow


def require_size(height: int, width: int) -> None:
    """Checked by every decoder before memory is taken: a file of 2 kB may claim 65500 x 65500 pixels.

    :raises NotDecodable: when these are more than :data:`MOST_PIXELS`
    """
    if height * width > MOST_PIXELS:
        raise NotDecodable(f"{width} x {height} pixels, and {MOST_PIXELS:,} are the most that are decoded")


def jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width in a JPEG file's header (the frame header of ITU-T T.81, B.2.2); None if there is none.

    :param data: the file's content
    """
    if not data.startswith(START):
        return None
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in FRAME_MARKERS:
            return int.from_bytes(data[place + 5 : place + 7], "big"), int.from_bytes(
                data[place + 7 : place + 9], "big"
            )
        else:
            place += 2 + length
    return None


def open_pillow(data: bytes, formats: tuple[str, ...] | None = ("JPEG",)) -> Image.Image:
    """A file's content as a Pillow image in RGB.

    :param formats: those of Pillow that are accepted; all when None
    :raises NotDecodable: for other files, and damaged ones
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if claimed := jpeg_size(data):
            require_size(*claimed)
        image = Image.open(io.BytesIO(data), formats=formats)
        require_size(image.height, image.width)
        return to_rgb(image)
    except NoRange as error:
        raise NotDecodable(str(error)) from error
    except MemoryError as error:
        raise NotDecodable("too large for the memory that is free") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        expected = "image that Pillow reads" if formats is None else "JPEG file"
        what = f"no {expected}" if isinstance(error, UnidentifiedImageError) else f"damaged: {error}"
        raise NotDecodable("empty" if not data else what) from error


def decode_pillow(data: bytes, out: Pixels | None = None) -> Pixels:
    pixels = np.asarray(open_pillow(data))
    if out is None or out.shape != pixels.shape:
        return pixels
    out[:] = pixels
    return out


def _decode_simplejpeg(data: bytes, out: Pixels | None = None) -> Pixels:
    import simplejpeg

    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        require_size(height, width)
        if colors in ("CMYK", "YCCK"):  # simplejpeg would return inverted colors
            return decode_pillow(data, out)
        if out is not None and (height, width) == out.shape[:2]:
            simplejpeg.decode_jpeg(data, buffer=out)
            return out
        pixels: Pixels = simplejpeg.decode_jpeg(data)
        return pixels
    except (ValueError, MemoryError):
        # simplejpeg refuses what libjpeg only warns of. Pillow decides, so that all decoders accept the same files.
        return decode_pillow(data, out)
