"""``dataloading.dataset.decoders``: the same pixels and the same refusals from each."""

from __future__ import annotations

import io
import resource
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from common.data import DECODERS
from common.errors import UsageError
from dataloading.dataset.decoders import NotDecodable, Pixels, get_decoder, installed, jpeg_size, open_pillow
from dataloading.synthetic.faces import draw, encode
from tests.dataloading.faults import save_picture

each = pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(
            name, marks=[] if name in installed() else pytest.mark.skip(reason=f"no {name}: pip install {name}")
        )
        for name in DECODERS
    ],
)


def jpeg(mode: str = "RGB", size: tuple[int, int] = (40, 33), **settings: Any) -> bytes:
    file = io.BytesIO()
    save_picture(file, 1, size=size, mode=mode, **settings)
    return file.getvalue()


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 33)).save(file, "PNG")
    return file.getvalue()


GOOD: dict[str, Callable[[], bytes]] = {
    "a face": lambda: encode(draw(0, 0)),
    "colour": jpeg,
    "grey": lambda: jpeg("L"),
    "CMYK": lambda: jpeg("CMYK"),
    "progressive": lambda: jpeg(progressive=True),
    "fine colours": lambda: jpeg(subsampling=0),
    "wide colours": lambda: jpeg(subsampling=1),
    "restart markers": lambda: jpeg(restart_marker_blocks=1),
    "one pixel": lambda: jpeg(size=(1, 1)),
    "turned by its EXIF data": lambda: jpeg(exif=_turned()),
    "something after its end": lambda: jpeg() + b"\0" * 100,
}
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "^empty$"),
    "text": (lambda: b"no picture at all" * 40, "^no JPEG file$"),
    "PNG": (png, "^no JPEG file$"),
    "zeros": (lambda: bytes(1000), "^no JPEG file$"),
    "only a beginning": (lambda: jpeg()[:3], "^no JPEG file$"),
    "only a header": (lambda: jpeg()[:200], "^(damaged: .*|no JPEG file)$"),
    "something before its beginning": (lambda: b"\0" + jpeg(), "^no JPEG file$"),
    "half": (lambda: jpeg()[: len(jpeg()) // 2], "^damaged: (image file is truncated|Truncated File Read)"),
    "all but the last pixels": (lambda: jpeg()[:-40], "^damaged: image file is truncated"),
}


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def in_the_middle(height: int, width: int) -> tuple[Pixels, Pixels]:
    """A batch's memory for three images, and the place of the second."""
    batch = np.full((3, height, width, 3), 77, np.uint8)
    return batch, batch[1]


@each
@pytest.mark.parametrize("kind", GOOD)
def test_every_decoder_gives_pillows_pixels_in_the_place_that_is_given_and_nowhere_else(
    decoder: str, kind: str
) -> None:
    """Every decoder gives Pillow's pixels, in the place that is given and nowhere else.

    Claim (dataloading/README.md, 6): every loader and decoder gives the same images.
    """
    data = GOOD[kind]()
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(get_decoder(decoder)(data, None), expected)
    batch, place = in_the_middle(*expected.shape[:2])
    assert get_decoder(decoder)(data, place) is place
    np.testing.assert_array_equal(batch[1], expected)
    assert (batch[[0, 2]] == 77).all()


@each
@pytest.mark.parametrize("shape", [(33, 41), (32, 40), (40, 33), (1, 1), (660, 2)])
def test_a_place_of_another_size_is_left_alone(decoder: str, shape: tuple[int, int]) -> None:
    batch, place = in_the_middle(*shape)
    pixels = get_decoder(decoder)(jpeg(), place)
    assert (batch == 77).all()
    np.testing.assert_array_equal(pixels, get_decoder("pillow")(jpeg(), None))


@each
@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_whole_jpeg_is_refused_and_only_its_own_place_may_be_touched(decoder: str, kind: str) -> None:
    make, message = BAD[kind]
    batch, place = in_the_middle(33, 40)
    for out in (None, place):
        with pytest.raises(NotDecodable, match=message) as refused:
            get_decoder(decoder)(make(), out)
        assert "\n" not in str(refused.value)
    assert (batch[[0, 2]] == 77).all()


def attempt(decoder: str, data: bytes, out: Pixels | None) -> Pixels | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, about strange metadata and about large images
        try:
            return get_decoder(decoder)(data, out)
        except NotDecodable as error:
            return str(error)


FILES = [make() for kind, make in GOOD.items() if kind not in ("a face", "one pixel")]


@st.composite
def damaged(draw_from: st.DrawFn) -> bytes:
    """A file with some bits flipped, half of the time in its headers, and perhaps without its end."""
    data = bytearray(draw_from(st.sampled_from(FILES)))
    headers = data.find(b"\xff\xda")
    for _ in range(draw_from(st.integers(0, 4))):
        place = draw_from(st.one_of(st.integers(0, headers + 10), st.integers(0, len(data) - 1)))
        data[place] ^= 1 << draw_from(st.integers(0, 7))
    return bytes(data[: draw_from(st.one_of(st.just(len(data)), st.integers(0, len(data))))])


@settings(max_examples=1000)
@given(damaged())
def test_all_decoders_accept_the_same_damaged_files_with_the_same_pixels(data: bytes) -> None:
    batch, place = in_the_middle(33, 40)
    expected = attempt("pillow", data, None)
    for decoder in installed():
        for out in (None, place):
            result = attempt(decoder, data, out)
            assert isinstance(result, str) == isinstance(expected, str)
            np.testing.assert_array_equal(result, expected)
    assert (batch[[0, 2]] == 77).all()


@pytest.mark.parametrize(("height", "width"), [(65535, 65535), (65500, 65500), (9460, 9460)])
def test_an_image_that_claims_to_be_enormous_is_refused_before_memory_is_taken(height: int, width: int) -> None:
    """An image that claims to be enormous is refused before memory is taken.

    Claim (dataloading/README.md, 8): an enormous image is refused by every decoder before memory is taken.
    """
    data = bytearray(jpeg())
    start_of_frame = data.find(b"\xff\xc0")
    data[start_of_frame + 5 : start_of_frame + 9] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for decoder in installed():
        with pytest.raises(
            NotDecodable, match=rf"^{width} x {height} pixels, and 89,478,485 are the most that are decoded$"
        ):
            get_decoder(decoder)(bytes(data), None)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize("kind", GOOD)
def test_the_size_in_the_header_is_the_images(kind: str) -> None:
    data = GOOD[kind]()
    image = open_pillow(data)
    assert jpeg_size(data) == (image.height, image.width)
    assert jpeg_size(data[:2] + b"\xff" * 5 + data[2:]) == (
        image.height,
        image.width,
    )  # fill bytes may precede a marker


def test_too_little_memory_is_a_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", none_left)
    with pytest.raises(NotDecodable, match=r"^too large for the memory that is free$"):
        open_pillow(jpeg())


def test_a_decoder_that_is_missing_is_refused_with_those_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloading.dataset.decoders.util.find_spec", lambda name: None)
    assert installed() == ("pillow",)
    with pytest.raises(UsageError, match=r"^there is no decoder 'guess' \(--decoder\): pillow, simplejpeg$"):
        get_decoder("guess")
    message = r"^decoder simplejpeg \(--decoder\) is not installed: pip install simplejpeg, or use pillow$"
    with pytest.raises(UsageError, match=message):
        get_decoder("simplejpeg")
