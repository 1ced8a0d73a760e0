"""Embedded faces: a data set with the layout, the long tail and the cost of Labeled Faces in the Wild, drawn here.

Who a person is fixes the features (the head's shape, skin, hair, eyes, brows, nose, mouth, beard, glasses); each image of
them varies the pose, the light, the expression, the clothes and the background, none of which tells who it is. A figure
is drawn flat with Pillow at twice the size, on a head that is an ellipsoid, so that it can turn; numpy then lights it.
Every draw is a function of (seed, identity, image), so that a face is the same however many are drawn and in which order.

:mod:`dataloading.synthetic.face_cache` writes them to a folder.
"""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from common.training.randomness import hash64, uniform
from dataloading.synthetic.drawing import (
    PIXELS_PER_UNIT,
    SIDE,
    TURN,
    Array,
    Pen,
    Point,
    View,
    arc,
    curve,
    ink,
    mirrored,
    mix,
    muted,
    oval,
    points_of,
    rgb,
)
from dataloading.synthetic.people import Person

QUALITY = 75

_FINE = 2 * SIDE  # the figure's canvas: its edges become smooth by averaging 2x2 pixels
_COARSE = SIDE // 2  # the canvas of what is soft anyway


def draw(identity: int, image: int, seed: int = 0) -> Image.Image:
    """Draw one image of a person.

    :param image: which one, from 0; there is no last one
    :param seed: another seed is other people with the same names
    :returns: RGB, 250x250
    """
    person = Person(seed, identity)
    key = (seed, "faces", identity, image)
    yaw, pitch, tilt, scale, right, down = (2 * uniform(6, *key, "pose") - 1).tolist()
    head = View(0.5 * yaw, 0.16 * pitch, 0.16 * tilt, 1 + 0.1 * scale, 16 * right, 4 + 12 * down)
    body = View(0.0, 0.0, 0.04 * tilt, 1 + 0.1 * scale, 10 * right, 4 + 12 * down)
    figure = Image.new("RGBa", (_FINE, _FINE))
    _draw_body(Pen(figure, body), person, uniform(8, *key, "clothes").tolist())
    _draw_head(Pen(figure, head), person, _Expression(*key))
    relief = _draw_relief(head, body, person)
    background = _draw_background(*key)
    return _light(figure.reduce(2), background, relief, head, *key)


def encode(image: Image.Image) -> bytes:
    """The image as a JPEG file of LFW's kind: baseline, quality 75, the colour at half the resolution (4:2:0)."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY, subsampling=2)
    return file.getvalue()


class _Expression:
    """0 ... 1 each (a mouth is often shut, eyes rarely), but the gaze: -1 ... 1."""

    def __init__(self, *key: int | str) -> None:
        self.smile, gape, gaze, lids, self.brows = uniform(5, *key, "expression").tolist()
        self.gape = max(0.0, 1.6 * gape - 0.6)
        self.gaze = 2 * gaze - 1
        self.lids = 0.75 + 0.25 * lids


def _draw_body(pen: Pen, person: Person, draws: list[float]) -> None:
    """What is behind the head and below it: long hair, the neck, and clothes that change from image to image."""
    hair = 0.8 * person.hair
    reach = person.width + person.volume
    if person.length == "afro":
        ripple = 1 + 0.025 * np.cos(len(TURN) / 2 * TURN[:, None])
        pen.fill(curve(oval(0, 0, reach + 0.28, 1.0 + person.volume) * ripple + points_of([(0, -0.35)])), hair)
    elif person.length == "bun":
        pen.fill(oval(0, -1.2 - person.volume, 0.34, 0.3), hair)
    elif person.length in ("bob", "long"):
        end = 0.75 if person.length == "bob" else 1.9
        right = [(0, -1.1), (0.8 * reach, -0.8), (reach, 0.0), (reach + 0.06, 0.5 * end), (reach + 0.02, end), (0, end)]
        pen.fill(curve(mirrored(right)), hair)
    pen.fill(mirrored([(0.4, 0.5), (0.38, 1.15), (0.6, 1.35), (0, 1.9)]), 0.88 * person.skin)

    colour = muted(draws[:3], 0.35 + 0.65 * draws[3])
    shoulders, neckline = 1.2 + 0.35 * draws[4], 1.3 + 0.3 * draws[5]
    right = [(0, neckline), (0.38, 1.12), (0.62, 1.3), (shoulders, 1.55), (shoulders + 0.3, 2.4), (0, 3.0)]
    pen.fill(mirrored(right), colour)
    if draws[6] < 0.4:
        pen.fill(mirrored([(0, 1.48), (0.36, 1.08), (0.46, 1.24), (0, 2.6)]), 225 + 0.12 * colour)
        pen.fill(mirrored([(0, 1.46), (0.09, 1.52), (0.05, 1.64), (0.12, 2.6), (0, 2.6)]), 200 - 0.7 * colour)
        for side in (-1, 1):
            pen.line(points_of([(side * 0.46, 1.22), (side * 0.3, 1.75), (side * 0.1, 2.4)]), 0.6 * colour, 2)
    elif draws[6] < 0.8:
        collar = [(-0.42, 1.12), (-0.3, 0.45 * neckline + 0.62), (0, neckline), (0.3, 0.45 * neckline + 0.62)]
        pen.line(arc(*collar, (0.42, 1.12)), 0.7 * colour, 5)


def _draw_head(pen: Pen, person: Person, expression: _Expression) -> None:
    width, skin = person.width, person.skin
    for side in (-1, 1):
        pen.fill(oval(side * (width + 0.02), 0.02, person.ears, 0.2), 0.92 * skin)
        pen.fill(oval(side * (width + 0.03), 0.03, 0.5 * person.ears, 0.12), 0.76 * skin)
    pen.fill(curve(mirrored(_outline(person))), skin)
    _draw_beard(pen, person)
    _draw_mouth(pen, person, expression)
    _draw_nose(pen, person)
    for side in (-1, 1):
        _draw_eye(pen, person, expression, side)
    if person.wrinkles:
        _draw_wrinkles(pen, person)
    _draw_hair(pen, person)
    if person.glasses < 0.22:
        _draw_glasses(pen, person)


def _outline(person: Person) -> list[Point]:
    """The right half of the head, from the crown down to the chin."""
    w = person.width
    skull = [(0, -1.04), (0.62 * w, -0.92), (0.97 * w, -0.5), (w, -0.05), (0.94 * w, 0.35)]
    return [*skull, (person.jaw + 0.04, 0.7), (person.chin, 0.97), (0, 1.02)]


def _draw_beard(pen: Pen, person: Person) -> None:
    if person.beard == "none":
        return
    colour = mix(person.skin, person.hair, 0.22 if person.beard == "stubble" else 0.85)
    w, m = person.width, person.mouth_width + 0.07
    moustache = curve(mirrored([(0, 0.42), (0.6 * m, 0.45), (1.1 * m, 0.62), (0.6 * m, 0.55), (0, 0.53)]))
    if person.beard in ("stubble", "full"):
        inner = [(0, 0.46), (m, 0.46), (0.8 * w, 0.3), (0.9 * w, -0.1)]
        outer = [(0.985 * w, -0.05), (0.95 * w, 0.35), (person.jaw + 0.06, 0.7), (person.chin + 0.03, 1.0), (0, 1.08)]
        pen.fill(curve(mirrored(inner + outer)), colour)
    elif person.beard == "goatee":
        pen.fill(curve(mirrored([(0.05, 0.72), (0.2, 0.8), (person.chin, 1.0), (0, 1.1)])), colour)
    if person.beard != "stubble":
        pen.fill(moustache, colour)
        u, v, shades = person.strands[::2].T
        low = 0.8 + 0.2 * v if person.beard != "moustache" else 0.45 + 0.06 * v
        starts = np.stack([(2 * u - 1) * person.chin, low], axis=1)
        pen.strands(starts, starts + points_of([(0, 0.07)]), colour, shades)


def _draw_mouth(pen: Pen, person: Person, expression: _Expression) -> None:
    """The lips as four curves over the mouth's width: two borders each, with the opening between."""
    across = np.linspace(-1, 1, 13, dtype=np.float32)
    arch = 1 - across**2
    x = across * person.mouth_width * (1 + 0.22 * expression.smile)
    line = 0.62 + (0.16 * expression.smile - 0.05) * (arch - 0.5)
    top = line - person.lip_fullness * (0.07 * arch - 0.03 * np.exp(-((across / 0.2) ** 2)))
    gap = line + (0.02 + 0.17 * expression.gape) * arch
    bottom = gap + person.lip_fullness * 0.08 * arch

    def between(upper: Array, lower: Array) -> Array:
        return np.concatenate([np.stack([x, upper], axis=1), np.stack([x, lower], axis=1)[::-1]])

    pen.fill(between(top, line), 0.88 * person.lips)
    pen.fill(between(line, gap), rgb(72, 22, 26))
    if expression.gape > 0.1:
        pen.fill(between(line, np.minimum(gap, line + 0.075 * arch)), rgb(244, 240, 230))
    pen.fill(between(gap, bottom), person.lips)


def _draw_nose(pen: Pen, person: Person) -> None:
    tip, width = person.nose_length, person.nose_width
    for side in (-1, 1):
        wing = arc((side * 0.8 * width, tip - 0.1), (side * width, tip), (side * 0.75 * width, tip + 0.06))
        pen.line(wing, 0.74 * person.skin, 1.5)
        pen.fill(oval(side * 0.5 * width, tip + 0.05, 0.36 * width, 0.022), 0.5 * person.skin)
    under = arc((-0.3 * width, tip + 0.06), (0, tip + 0.085), (0.3 * width, tip + 0.06))
    pen.line(under, 0.74 * person.skin, 1.5)


def _draw_eye(pen: Pen, person: Person, expression: _Expression, side: int) -> None:
    """An almond between two parabolas; the iris is a disc whose points are held between the same two."""
    across = np.linspace(-1, 1, 11, dtype=np.float32)
    size, centre = person.eye_size, points_of([(side * person.eye_gap, -0.12)])
    slant = side * person.eye_slant / size
    height = size * (0.58 * expression.lids - 0.1 * expression.smile)

    def placed(x: Array, y: Array) -> Array:
        place: Array = np.stack([x, y + slant * x], axis=1) + centre
        return place

    def lid(x: Array, sign: float) -> Array:
        curve: Array = sign * height * (1 - (x / size) ** 2)
        return curve

    x = size * across
    upper, lower = placed(x, lid(x, -1.0)), placed(x, lid(x, 0.7))
    pen.fill(np.concatenate([upper, lower[::-1]]), rgb(240, 238, 234))
    look = 0.35 * size * expression.gaze
    for radius, colour in ((0.5, 0.5 * person.iris), (0.43, person.iris), (0.2, rgb(12, 12, 12))):
        disc_x, disc_y = oval(look, -0.06 * size, radius * size, radius * size).T
        pen.fill(placed(disc_x, np.clip(disc_y, lid(disc_x, -1.0), lid(disc_x, 0.7))), colour)
    pen.fill(placed(*oval(look - 0.15 * size, -0.22 * size, 0.1 * size, 0.1 * size).T), rgb(250, 250, 250))
    pen.line(lower, 0.8 * person.skin, 1)
    pen.line(upper, 0.3 * person.skin, 2)
    pen.line(upper[2:-2] - points_of([(0, 0.055)]), 0.82 * person.skin, 1)

    outwards = side * across
    rise = person.brow_height - 0.06 * expression.brows + 0.02 * outwards
    rise -= person.brow_arch * (1 - (outwards - 0.2) ** 2)
    half = person.brow_weight * (1.1 - 0.7 * np.maximum(0, outwards)) * np.minimum(1, 4 * (1.1 - abs(across)))
    above, below = placed(1.35 * x, rise - half), placed(1.35 * x, rise + half)
    pen.fill(np.concatenate([above, below[::-1]]), 0.75 * mix(person.skin, person.hair, 0.85))


def _draw_wrinkles(pen: Pen, person: Person) -> None:
    colour = (0.92 - 0.25 * person.wrinkles) * person.skin
    for side in (-1, 1):
        pen.line(arc((side * 0.2, 0.2), (side * 0.32, 0.38), (side * 0.36, 0.56)), colour, 1.5)
    for y in (-0.55, -0.64):
        pen.line(arc((-0.3, y), (0, y - 0.03), (0.3, y)), colour, 1)


def _draw_hair(pen: Pen, person: Person) -> None:
    """The hair over the forehead: between an outer curve, from ear to ear over the crown, and the hairline."""
    w, low = person.width, person.hairline_height
    if person.hairline == "bald":
        for side in (-1, 1):
            patch = [(0.93 * w, 0.0), (0.87 * w, -0.3), (0.9 * w, -0.55), (1.04 * w, -0.4), (1.08 * w, -0.05)]
            pen.fill(curve(points_of(patch) * points_of([(side, 1)])), person.hair)
        return
    reach, crown = w + 0.3 * person.volume, -1.05 - person.volume
    outer = [(-reach, 0.02), (-reach - 0.02, -0.45), (-0.72 * reach, 0.82 * crown), (0, crown)]
    outer += [(-x, y) for x, y in outer[2::-1]]
    lines = {
        "straight": [(-0.93 * w, -0.1), (-0.86 * w, low + 0.1), (-0.4 * w, low + 0.08), (0, low + 0.06)],
        "parted": [(-0.93 * w, -0.1), (-0.8 * w, low + 0.05), (-0.45 * w, low - 0.22), (0, low - 0.02)],
        "curtain": [(-0.95 * w, -0.05), (-0.84 * w, low + 0.18), (-0.4 * w, low - 0.08), (0, low - 0.25)],
        "receding": [(-0.93 * w, -0.1), (-0.84 * w, low + 0.02), (-0.55 * w, low - 0.18), (0, low - 0.05)],
    }
    inner = lines[person.hairline]
    inner = inner + [(-x, y) for x, y in inner[2::-1]]
    if person.hairline == "parted":
        inner[4:6] = [(0.4 * w, low + 0.12), (0.82 * w, low + 0.2)]
    top, edge = arc(*outer), arc(*inner)
    pen.fill(np.concatenate([top, edge[::-1]]), person.hair)

    u, v, shades = person.strands.T
    at = (u * (len(top) - 3)).astype(np.int64) + 1
    start, end = (0.05 + 0.5 * v)[:, None], (0.6 + 0.38 * v)[:, None]
    lean = np.where(at < len(top) / 2, -1, 1)
    pen.strands(mix(top[at], edge[at], start), mix(top[at + lean], edge[at + lean], end), person.hair, shades)


def _draw_glasses(pen: Pen, person: Person) -> None:
    metal = rgb(40, 34, 36) + 500 * max(0.0, person.glasses - 0.08)
    gap, width, height = person.eye_gap + 0.02, person.eye_size + 0.1, 0.13 + 0.5 * person.glasses
    thickness = 1.5 + 10 * max(0.0, 0.15 - person.glasses)
    for side in (-1, 1):
        rim = oval(side * gap, -0.1, width, height)
        pen.line(np.concatenate([rim, rim[:2]]), metal, thickness)
        pen.line(points_of([(side * (gap + width), -0.14), (side * person.width, -0.12)]), metal, thickness)
    pen.line(points_of([(width - gap, -0.12), (0, -0.16), (gap - width, -0.12)]), metal, thickness)


def _draw_relief(head: View, body: View, person: Person) -> Array:
    """What makes the face round: blurred hollows and ridges. A factor of the brightness, about 1; float32 [125, 125]."""
    image = Image.new("L", (_COARSE, _COARSE), 128)
    pen, below = Pen(image, head), Pen(image, body)
    below.fill(oval(0, 1.12, 0.5, 0.24), 84)
    pen.fill(curve(mirrored(_outline(person))), 128)
    tip, width = person.nose_length, person.nose_width
    for side in (-1, 1):
        pen.fill(oval(side * person.eye_gap, -0.16, 0.2, 0.13), 112)
        pen.fill(oval(side * 0.42, 0.22, 0.16, 0.12), 140)
        pen.fill(oval(side * 0.12, 0.0, 0.05, 0.2), 116)
        pen.fill(oval(side * 0.55, 0.5, 0.1, 0.22), 118)
    pen.fill(oval(0, -0.55, 0.3, 0.16), 136)
    pen.fill(oval(0, 0.5 * tip - 0.05, 0.04, 0.55 * tip + 0.08), 146)
    pen.fill(oval(0, tip - 0.02, 0.55 * width, 0.06), 148)
    pen.fill(oval(0, tip + 0.13, 1.1 * width, 0.05), 110)
    pen.fill(oval(0, 0.8, 0.16, 0.035), 108)
    pen.fill(oval(0, 0.9, 0.14, 0.06), 138)
    relief: Array = np.asarray(image.filter(ImageFilter.GaussianBlur(2.2)), np.float32) / np.float32(128)
    return relief


def _draw_background(*key: int | str) -> Image.Image:
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
        fill = ink(mix(base, muted(colour, strength), 0.3 + 0.6 * strength))
        if kind < 0.5:
            canvas.ellipse((x - width / 2, y - height / 2, x + width / 2, y + height / 2), fill=fill)
        elif kind < 0.75:
            canvas.rectangle((x - width / 4, 0, x + width / 4, _COARSE), fill=fill)
        else:
            canvas.rectangle((x - width / 2, y - height / 2, x + width / 2, y + height / 2), fill=fill)
    blurred = image.filter(ImageFilter.BoxBlur(0.5 + 5 * tones[7] ** 2))
    return blurred.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def _light(figure: Image.Image, background: Image.Image, relief: Array, head: View, *key: int | str) -> Image.Image:
    """Light the flat figure as an ellipsoid, put it before the background, and add the camera's noise."""
    side, height, strength, warmth, exposure, noise, left, top = uniform(8, *key, "light").tolist()
    y, x = np.mgrid[0:_COARSE, 0:_COARSE].astype(np.float32) * (SIDE / _COARSE)
    x, y = (x - head.centre[0]) / (0.95 * PIXELS_PER_UNIT), (y - head.centre[1]) / (1.3 * PIXELS_PER_UNIT)
    towards = np.sqrt(np.maximum(0.05, 1 - x**2 - y**2))
    direction = (1.6 * side - 0.8, -0.7 * height, 0.75)
    lambert = np.clip(x, -1, 1) * direction[0] + np.clip(y, -1, 1) * direction[1] + towards * direction[2]
    shade = relief * (1 + (0.2 + 0.4 * strength) * (lambert - 0.6))
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
    """Noise of mean 0 and variance 1, larger than an image, so that each can take another part; float32 [500, 500]."""
    bits = hash64("faces-grain", np.arange(_FINE * _FINE)).view(np.uint8)
    white = bits.reshape(_FINE, _FINE, 8).sum(axis=-1, dtype=np.float32)
    white -= white.mean()
    # half as much again of a coarser kind, as a photograph has
    coarse = np.mean([np.roll(white, (i, j), (0, 1)) for i in range(3) for j in range(3)], axis=0)
    grain: Array = white + np.float32(1.5) * coarse
    grain /= grain.std()
    return grain
