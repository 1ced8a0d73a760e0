"""Shapes on a head that can turn: what :mod:`dataloading.synthetic.faces` draws with."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Array = npt.NDArray[np.float32]
Point = tuple[float, float]

SIDE = 250
PIXELS_PER_UNIT = 66.0  # a head is two units high

# 0.8 deep, 0.85 wide and 1.15 high
_FLATNESS = np.array([[0.64 / 0.85**2], [0.64 / 1.15**2]], np.float32)


class View:
    """Where a head's points appear. Angles in radians, shifts in pixels of the finished image."""

    def __init__(self, yaw: float, pitch: float, tilt: float, scale: float, right: float, down: float) -> None:
        along, across = scale * PIXELS_PER_UNIT * math.cos(tilt), scale * PIXELS_PER_UNIT * math.sin(tilt)
        rolled = np.array([[along, across], [-across, along]], np.float32)
        self.of_point = np.array([[math.cos(yaw)], [math.cos(pitch)]], np.float32) * rolled
        self.of_depth = np.array([[math.sin(yaw), math.sin(pitch)]], np.float32) @ rolled
        self.centre = np.array([SIDE / 2 + right, SIDE / 2 + down], np.float32)

    def __call__(self, points: Array) -> Array:
        """Points [n, 2] of the face, seen from the front, to pixels of the finished image, float32 [n, 2].

        Each lies on an ellipsoid, the nearer the middle the farther in front, and so moves as the head turns.
        """
        depth = np.sqrt(np.maximum(0, 0.64 - points**2 @ _FLATNESS))
        seen: Array = points @ self.of_point + depth @ self.of_depth + self.centre
        return seen


class Pen:
    """Draws shapes given in a face's coordinates: x to the right and y down, in units of half a head's height."""

    def __init__(self, image: Image.Image, view: View) -> None:
        self.canvas = ImageDraw.Draw(image)
        self.view = view
        self.zoom = image.width / SIDE

    def fill(self, points: Array, colour: Array | int) -> None:
        self.canvas.polygon((self.zoom * self.view(points)).ravel().tolist(), fill=ink(colour))

    def line(self, points: Array, colour: Array, width: float) -> None:
        """``width`` in pixels of the finished image."""
        path = (self.zoom * self.view(points)).ravel().tolist()
        self.canvas.line(path, fill=ink(colour), width=round(self.zoom * width), joint="curve")

    def strands(self, starts: Array, ends: Array, colour: Array, shades: Array) -> None:
        """Hairs from ``starts`` to ``ends``, both [n, 2], each darker or lighter by its shade in 0 ... 1."""
        paths = self.zoom * self.view(np.concatenate([starts, ends], axis=1).reshape(-1, 2))
        colours = np.clip(colour * (0.72 + 0.5 * shades[:, None]) + 12 * shades[:, None], 0, 255).astype(int)
        for path, (red, green, blue) in zip(paths.reshape(-1, 4).tolist(), colours.tolist(), strict=True):
            self.canvas.line(path, fill=(red, green, blue, 255), width=3)


def ink(colour: Array | int) -> int | tuple[int, ...]:
    if isinstance(colour, int):
        return colour
    red, green, blue = colour.tolist()
    return min(255, max(0, int(red))), min(255, max(0, int(green))), min(255, max(0, int(blue))), 255


def mix(first: Array, second: Array, share: float | Array) -> Array:
    mixed: Array = first + (second - first) * share
    return mixed


def muted(draws: list[float], brightness: float) -> Array:
    """A colour such as walls and clothes have: grey with some hue."""
    hue = np.array(draws, np.float32)
    hue = mix(hue, hue.mean(), 0.6)
    colour: Array = (20 + 225 * brightness) * hue / hue.max()
    return colour


def blend_along(colours: npt.NDArray[np.int64], position: float) -> Array:
    """The colour at ``position`` in 0 ... 1 of the way along a row of colours."""
    index, share = divmod(position * (len(colours) - 1), 1)
    following = min(int(index) + 1, len(colours) - 1)
    return mix(colours[int(index)].astype(np.float32), colours[following].astype(np.float32), share)


def rgb(red: float, green: float, blue: float) -> Array:
    return np.array((red, green, blue), np.float32)


def points_of(pairs: list[Point]) -> Array:
    return np.array(pairs, np.float32)


def mirrored(right: list[Point]) -> Array:
    """The whole outline, from its right half (top to bottom)."""
    return points_of(right + [(-x, y) for x, y in right[::-1] if x])


TURN = np.linspace(0, 2 * np.pi, 24, endpoint=False, dtype=np.float32)
_CIRCLE = np.stack([np.cos(TURN), np.sin(TURN)], axis=1).astype(np.float32)


def oval(x: float, y: float, half_width: float, half_height: float) -> Array:
    return _CIRCLE * points_of([(half_width, half_height)]) + points_of([(x, y)])


_STEPS = np.arange(5, dtype=np.float32)[:, None] / 5
_CATMULL_ROM = np.array([(0, 2, 0, 0), (-1, 0, 1, 0), (2, -5, 4, -1), (-1, 3, -3, 1)], np.float32) / 2
_SPLINE = (_STEPS ** np.arange(4) @ _CATMULL_ROM).astype(np.float32)


def curve(points: Array) -> Array:
    """A smooth closed curve through the points (Catmull and Rom's spline), five points for each."""
    return _through(np.concatenate([points[-1:], points, points[:2]]))


def arc(*pairs: Point) -> Array:
    """A smooth curve from the first point to the last."""
    points = points_of(list(pairs))
    return np.concatenate([_through(np.concatenate([points[:1], points, points[-1:]])), points[-1:]])


def _through(points: Array) -> Array:
    windows = np.stack([points[i : len(points) - 3 + i] for i in range(4)], axis=1)
    curve: Array = (_SPLINE @ windows).reshape(-1, 2)
    return curve
