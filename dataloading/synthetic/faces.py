"""Drawn faces: a data set with the layout, the long tail and the cost of Labeled Faces in the Wild, without its photographs.

The identity fixes a person's features: the head's shape, skin, hair, eyes, brows, nose, mouth, beard, glasses. Each image
varies the pose, the light, the expression, the clothes and the background, which do not reveal the person. Pillow draws a
flat figure at twice the size, on a head that is an ellipsoid, so that it can turn; numpy then lights it. Every random number
is a function of (seed, identity, image), so a face does not depend on how many others are drawn, or in which order.

:mod:`dataloading.synthetic.face_cache` writes the faces to a folder.
"""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from common.randomness import hash64, uniform
from dataloading.synthetic.drawing import (
    PIXELS_PER_UNIT,
    SIDE,
    TURN,
    Array,
    Pen,
    View,
    arc,
    ink,
    mix,
    muted,
    outline,
    oval,
    smooth,
    symmetric,
)
from dataloading.synthetic.person import Person

QUALITY = 75

_FINE = 2 * SIDE  # the figure's canvas: averaging 2x2 pixels makes its edges smooth
_COARSE = SIDE // 2  # the canvas of what is blurred anyway


def draw(identity: int, image: int, seed: int = 0) -> Image.Image:
    """Draw one image of a person.

    :param identity: the person
    :param image: the number of the image, from 0 without an end
    :param seed: another seed gives other people with the same names
    :returns: RGB, 250x250
    """
    person, key = Person(seed, identity), (seed, "faces", identity, image)
    yaw, pitch, tilt, scale, right, down = (2 * uniform(6, *key, "pose") - 1).tolist()
    head = View(0.5 * yaw, 0.16 * pitch, 0.16 * tilt, 1 + 0.1 * scale, 16 * right, 4 + 12 * down)
    body = View(0.0, 0.0, 0.04 * tilt, 1 + 0.1 * scale, 10 * right, 4 + 12 * down)
    figure, relief = Image.new("RGBa", (_FINE, _FINE)), Image.new("L", (_COARSE, _COARSE), 128)
    _draw_body(Pen(figure, body), person, uniform(8, *key, "clothes").tolist())
    _draw_head(Pen(figure, head), person, *uniform(5, *key, "expression").tolist())
    _draw_relief(Pen(relief, head), Pen(relief, body), person)
    return _light(figure.reduce(2), _background(*key), relief, head, *key)


def encode(image: Image.Image) -> bytes:
    """The image as a JPEG file of LFW's kind: baseline, quality 75, the colour at half the resolution (4:2:0)."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY, subsampling=2)
    return file.getvalue()


def _draw_body(pen: Pen, person: Person, draws: list[float]) -> None:
    """What is behind the head and below it: long hair, the neck, and clothes that change from image to image."""
    hair, reach = 0.8 * person.hair, person.width + person.volume
    if person.length == "afro":
        ripple = 1 + 0.025 * np.cos(len(TURN) / 2 * TURN[:, None])
        pen.fill(smooth(oval(0, 0, reach + 0.28, 1.0 + person.volume) * ripple + outline((0, -0.35))), hair)
    elif person.length == "bun":
        pen.fill(oval(0, -1.2 - person.volume, 0.34, 0.3), hair)
    elif person.length in ("bob", "long"):
        end = 0.75 if person.length == "bob" else 1.9
        right = (0, -1.1), (0.8 * reach, -0.8), (reach, 0.0), (reach + 0.06, 0.5 * end), (reach + 0.02, end), (0, end)
        pen.fill(smooth(symmetric(*right)), hair)
    pen.fill(symmetric((0.4, 0.5), (0.38, 1.15), (0.6, 1.35), (0, 1.9)), 0.88 * person.skin)

    colour = muted(draws[:3], 0.35 + 0.65 * draws[3])
    shoulders, neckline = 1.2 + 0.35 * draws[4], 1.3 + 0.3 * draws[5]
    right = (0, neckline), (0.38, 1.12), (0.62, 1.3), (shoulders, 1.55), (shoulders + 0.3, 2.4), (0, 3.0)
    pen.fill(symmetric(*right), colour)
    if draws[6] < 0.4:  # a jacket, with shirt and tie
        pen.fill(symmetric((0, 1.48), (0.36, 1.08), (0.46, 1.24), (0, 2.6)), 225 + 0.12 * colour)
        pen.fill(symmetric((0, 1.46), (0.09, 1.52), (0.05, 1.64), (0.12, 2.6), (0, 2.6)), 200 - 0.7 * colour)
        pen.lines(outline((0.46, 1.22), (0.3, 1.75), (0.1, 2.4)), 0.6 * colour, 2)
    elif draws[6] < 0.8:  # a collar
        low = 0.45 * neckline + 0.62
        pen.line(arc((-0.42, 1.12), (-0.3, low), (0, neckline), (0.3, low), (0.42, 1.12)), 0.7 * colour, 5)


def _draw_head(pen: Pen, person: Person, smile: float, gape: float, gaze: float, lids: float, brows: float) -> None:
    """The face, from the back to the front. The expression's five numbers are in 0 ... 1."""
    skin, tip, nose = person.skin, person.nose_length, person.nose_width
    pen.ovals(person.width + 0.02, 0.02, person.ears, 0.2, 0.92 * skin)
    pen.ovals(person.width + 0.03, 0.03, 0.5 * person.ears, 0.12, 0.76 * skin)
    pen.fill(person.outline, skin)
    _draw_beard(pen, person)
    _draw_mouth(pen, person, smile, max(0.0, 1.6 * gape - 0.6))  # often shut
    pen.lines(arc((0.8 * nose, tip - 0.1), (nose, tip), (0.75 * nose, tip + 0.06)), 0.74 * skin, 1.5)
    pen.ovals(0.5 * nose, tip + 0.05, 0.36 * nose, 0.022, 0.5 * skin)
    pen.line(arc((-0.3 * nose, tip + 0.06), (0, tip + 0.085), (0.3 * nose, tip + 0.06)), 0.74 * skin, 1.5)
    for side in (-1, 1):
        height = person.eye_size * (0.58 * (0.75 + 0.25 * lids) - 0.1 * smile)
        _draw_eye(pen, person, side, height, 2 * gaze - 1, brows)
    if person.wrinkles:
        wrinkle = (0.92 - 0.25 * person.wrinkles) * skin
        pen.lines(arc((0.2, 0.2), (0.32, 0.38), (0.36, 0.56)), wrinkle, 1.5)
        for y in (-0.55, -0.64):
            pen.line(arc((-0.3, y), (0, y - 0.03), (0.3, y)), wrinkle, 1)
    _draw_hair(pen, person)
    if person.glasses < 0.22:
        metal = outline((40, 34, 36))[0] + 500 * max(0.0, person.glasses - 0.08)
        gap, width, height = person.eye_gap + 0.02, person.eye_size + 0.1, 0.13 + 0.5 * person.glasses
        thickness = 1.5 + 10 * max(0.0, 0.15 - person.glasses)
        for side in (-1, 1):
            rim = oval(side * gap, -0.1, width, height)
            pen.line(np.concatenate([rim, rim[:2]]), metal, thickness)
        pen.lines(outline((gap + width, -0.14), (person.width, -0.12)), metal, thickness)
        pen.line(outline((width - gap, -0.12), (0, -0.16), (gap - width, -0.12)), metal, thickness)


def _draw_beard(pen: Pen, person: Person) -> None:
    if person.beard == "none":
        return
    colour = mix(person.skin, person.hair, 0.22 if person.beard == "stubble" else 0.85)
    w, m, chin = person.width, person.mouth_width + 0.07, person.chin
    if person.beard in ("stubble", "full"):
        inner = (0, 0.46), (m, 0.46), (0.8 * w, 0.3), (0.9 * w, -0.1)
        outer = (0.985 * w, -0.05), (0.95 * w, 0.35), (person.jaw + 0.06, 0.7), (chin + 0.03, 1.0), (0, 1.08)
        pen.fill(smooth(symmetric(*inner, *outer)), colour)
    elif person.beard == "goatee":
        pen.fill(smooth(symmetric((0.05, 0.72), (0.2, 0.8), (chin, 1.0), (0, 1.1))), colour)
    if person.beard != "stubble":
        moustache = (0, 0.42), (0.6 * m, 0.45), (1.1 * m, 0.62), (0.6 * m, 0.55), (0, 0.53)
        pen.fill(smooth(symmetric(*moustache)), colour)
        u, v, shades = person.strands[::2].T
        low = 0.8 + 0.2 * v if person.beard != "moustache" else 0.45 + 0.06 * v
        starts = np.stack([(2 * u - 1) * chin, low], axis=1)
        pen.strands(starts, starts + outline((0, 0.07)), colour, shades)


def _draw_mouth(pen: Pen, person: Person, smile: float, gape: float) -> None:
    """The lips as four curves over the mouth's width: two borders each, with the opening between them."""
    across = np.linspace(-1, 1, 13, dtype=np.float32)
    arch = 1 - across**2
    x = across * person.mouth_width * (1 + 0.22 * smile)
    line = 0.62 + (0.16 * smile - 0.05) * (arch - 0.5)
    top = line - person.lip_fullness * (0.07 * arch - 0.03 * np.exp(-((across / 0.2) ** 2)))
    gap = line + (0.02 + 0.17 * gape) * arch
    bottom = gap + person.lip_fullness * 0.08 * arch
    teeth = np.minimum(gap, line + 0.075 * arch)
    dark, white = outline((72, 22, 26), (244, 240, 230))
    bands = [(top, line, 0.88 * person.lips), (line, gap, dark), (line, teeth, white), (gap, bottom, person.lips)]
    for upper, lower, colour in bands:
        if colour is not white or gape > 0.1:
            pen.fill(np.concatenate([np.stack([x, upper], axis=1), np.stack([x, lower], axis=1)[::-1]]), colour)


def _draw_eye(pen: Pen, person: Person, side: int, height: float, gaze: float, brows: float) -> None:
    """An almond between two parabolas, and its brow. The iris is a disc, clipped to the same parabolas."""
    across = np.linspace(-1, 1, 11, dtype=np.float32)
    size, centre = person.eye_size, outline((side * person.eye_gap, -0.12))
    slant = side * person.eye_slant / size

    def placed(x: Array, y: Array) -> Array:
        place: Array = np.stack([x, y + slant * x], axis=1) + centre
        return place

    def lid(x: Array, sign: float) -> Array:
        curve: Array = sign * height * (1 - (x / size) ** 2)
        return curve

    x = size * across
    upper, lower = placed(x, lid(x, -1.0)), placed(x, lid(x, 0.7))
    white, pupil, glint = outline((240, 238, 234), (12, 12, 12), (250, 250, 250))
    pen.fill(np.concatenate([upper, lower[::-1]]), white)
    look = 0.35 * size * gaze
    for radius, colour in ((0.5, 0.5 * person.iris), (0.43, person.iris), (0.2, pupil)):
        disc_x, disc_y = oval(look, -0.06 * size, radius * size, radius * size).T
        pen.fill(placed(disc_x, np.clip(disc_y, lid(disc_x, -1.0), lid(disc_x, 0.7))), colour)
    pen.fill(placed(*oval(look - 0.15 * size, -0.22 * size, 0.1 * size, 0.1 * size).T), glint)
    pen.line(lower, 0.8 * person.skin, 1)
    pen.line(upper, 0.3 * person.skin, 2)
    pen.line(upper[2:-2] - outline((0, 0.055)), 0.82 * person.skin, 1)

    outwards = side * across
    rise = person.brow_height - 0.06 * brows + 0.02 * outwards - person.brow_arch * (1 - (outwards - 0.2) ** 2)
    half = person.brow_weight * (1.1 - 0.7 * np.maximum(0, outwards)) * np.minimum(1, 4 * (1.1 - abs(across)))
    above, below = placed(1.35 * x, rise - half), placed(1.35 * x, rise + half)
    pen.fill(np.concatenate([above, below[::-1]]), 0.75 * mix(person.skin, person.hair, 0.85))


def _draw_hair(pen: Pen, person: Person) -> None:
    """The hair over the forehead: between an outer curve, from ear to ear over the crown, and the hairline."""
    w, low = person.width, person.hairline_height
    if person.hairline == "bald":
        patch = (0.93 * w, 0.0), (0.87 * w, -0.3), (0.9 * w, -0.55), (1.04 * w, -0.4), (1.08 * w, -0.05)
        for side in (-1, 1):
            pen.fill(smooth(outline(*patch) * outline((side, 1))), person.hair)
        return
    reach, crown = w + 0.3 * person.volume, -1.05 - person.volume
    outer = [(-reach, 0.02), (-reach - 0.02, -0.45), (-0.72 * reach, 0.82 * crown), (0, crown)]
    inner = {
        "straight": [(-0.93 * w, -0.1), (-0.86 * w, low + 0.1), (-0.4 * w, low + 0.08), (0, low + 0.06)],
        "parted": [(-0.93 * w, -0.1), (-0.8 * w, low + 0.05), (-0.45 * w, low - 0.22), (0, low - 0.02)],
        "curtain": [(-0.95 * w, -0.05), (-0.84 * w, low + 0.18), (-0.4 * w, low - 0.08), (0, low - 0.25)],
        "receding": [(-0.93 * w, -0.1), (-0.84 * w, low + 0.02), (-0.55 * w, low - 0.18), (0, low - 0.05)],
    }[person.hairline]
    for line in (outer, inner):
        line += [(-x, y) for x, y in line[2::-1]]
    if person.hairline == "parted":
        inner[4:6] = [(0.4 * w, low + 0.12), (0.82 * w, low + 0.2)]
    top, edge = arc(*outer), arc(*inner)
    pen.fill(np.concatenate([top, edge[::-1]]), person.hair)

    u, v, shades = person.strands.T
    at = (u * (len(top) - 3)).astype(np.int64) + 1
    start, end = (0.05 + 0.5 * v)[:, None], (0.6 + 0.38 * v)[:, None]
    lean = np.where(at < len(top) / 2, -1, 1)
    pen.strands(mix(top[at], edge[at], start), mix(top[at + lean], edge[at + lean], end), person.hair, shades)


def _draw_relief(pen: Pen, below: Pen, person: Person) -> None:
    """Hollows and ridges that make the face round, as a grey image: 128 leaves the brightness as it is."""
    below.fill(oval(0, 1.12, 0.5, 0.24), 84)
    pen.fill(person.outline, 128)
    tip, nose = person.nose_length, person.nose_width
    for x, y, half_width, half_height, grey in (
        (person.eye_gap, -0.16, 0.2, 0.13, 112),
        (0.42, 0.22, 0.16, 0.12, 140),
        (0.12, 0.0, 0.05, 0.2, 116),
        (0.55, 0.5, 0.1, 0.22, 118),
        (0, -0.55, 0.3, 0.16, 136),
        (0, 0.5 * tip - 0.05, 0.04, 0.55 * tip + 0.08, 146),
        (0, tip - 0.02, 0.55 * nose, 0.06, 148),
        (0, tip + 0.13, 1.1 * nose, 0.05, 110),
        (0, 0.8, 0.16, 0.035, 108),
        (0, 0.9, 0.14, 0.06, 138),
    ):
        pen.ovals(x, y, half_width, half_height, grey)


def _background(*key: int | str) -> Image.Image:
    """Out of focus: a gradient with blobs, bars and panels; RGB, 250x250."""
    tones = uniform(8, *key, "background").tolist()
    shapes = uniform(9, *key, "background-shapes", np.arange(3 + int(9 * tones[6]))).tolist()
    image = Image.new("RGB", (_COARSE, _COARSE))
    base = muted(tones[:3], tones[3])
    canvas = ImageDraw.Draw(image)
    for y in range(0, _COARSE, 5):
        canvas.rectangle((0, y, _COARSE, y + 5), fill=ink(base * (1 + (tones[4] - 0.5) * (y / _COARSE - 0.5))))
    for kind, x, y, width, height, *colour, strength in shapes:
        x, y, width, height = _COARSE * x, _COARSE * y, 6 + 40 * width, 6 + 60 * height
        box = x - width / 2, y - height / 2, x + width / 2, y + height / 2
        if 0.5 <= kind < 0.75:
            box = x - width / 4, 0, x + width / 4, _COARSE
        paint = canvas.ellipse if kind < 0.5 else canvas.rectangle
        paint(box, fill=ink(mix(base, muted(colour, strength), 0.3 + 0.6 * strength)))
    blurred = image.filter(ImageFilter.BoxBlur(0.5 + 5 * tones[7] ** 2))
    return blurred.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def _light(
    figure: Image.Image, background: Image.Image, relief: Image.Image, head: View, *key: int | str
) -> Image.Image:
    """Light the flat figure as an ellipsoid, put it before the background, and add the camera's noise."""
    side, height, strength, warmth, exposure, noise, left, top = uniform(8, *key, "light").tolist()
    y, x = np.mgrid[0:_COARSE, 0:_COARSE].astype(np.float32) * (SIDE / _COARSE)
    x, y = (x - head.centre[0]) / (0.95 * PIXELS_PER_UNIT), (y - head.centre[1]) / (1.3 * PIXELS_PER_UNIT)
    towards = np.sqrt(np.maximum(0.05, 1 - x**2 - y**2))
    lambert = np.clip(x, -1, 1) * (1.6 * side - 0.8) + np.clip(y, -1, 1) * (-0.7 * height) + towards * 0.75
    blurred = np.asarray(relief.filter(ImageFilter.GaussianBlur(2.2)), np.float32) / np.float32(128)
    shade = blurred * (1 + (0.2 + 0.4 * strength) * (lambert - 0.6))
    shade = np.asarray(Image.fromarray(shade).resize((SIDE, SIDE), Image.Resampling.BILINEAR))

    *colours, cover = (np.asarray(band) for band in figure.split())
    clear = 1 - cover / np.float32(255)
    down, right = int(SIDE * top), int(SIDE * left)
    grain = (2.0 + 4.5 * noise) * _grain()[down : down + SIDE, right : right + SIDE]
    tint = 1 + 0.12 * (warmth - 0.5), 1.0, 1 - 0.16 * (warmth - 0.5)
    planes = []
    for colour, behind, share in zip(colours, np.moveaxis(np.asarray(background), 2, 0), tint, strict=True):
        plane = (colour * shade + behind * clear) * (share * (0.72 + 0.33 * exposure)) + grain
        planes.append(Image.fromarray(np.clip(plane, 0, 255).astype(np.uint8)))
    return Image.merge("RGB", planes)


@functools.cache
def _grain() -> Array:
    """Noise of mean 0 and variance 1, larger than an image, so that each image uses another part; float32 [500, 500]."""
    bits = hash64("faces-grain", np.arange(_FINE * _FINE)).view(np.uint8)
    white = bits.reshape(_FINE, _FINE, 8).sum(axis=-1, dtype=np.float32)
    white -= white.mean()
    # Photographs also have coarser noise: half as much again.
    coarse = np.mean([np.roll(white, (i, j), (0, 1)) for i in range(3) for j in range(3)], axis=0)
    grain: Array = white + np.float32(1.5) * coarse
    grain /= grain.std()
    return grain
