"""Shapes on a head that can turn: the tools with which :mod:`dataloading.synthetic.faces` draws."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Array = npt.NDArray[np.float32]

SIDE = 250
PIXELS_PER_UNIT = 66.0  # a head is two units high
TURN = np.linspace(0, 2 * np.pi, 24, endpoint=False, dtype=np.float32)

_CIRCLE = np.stack([np.cos(TURN), np.sin(TURN)], axis=1).astype(np.float32)
_FLATNESS = np.array([[0.64 / 0.85**2], [0.64 / 1.15**2]], np.float32)  # the head: 0.8 deep, 0.85 wide and 1.15 high
_CATMULL_ROM = np.array([(0, 2, 0, 0), (-1, 0, 1, 0), (2, -5, 4, -1), (-1, 3, -3, 1)], np.float32) / 2
_SPLINE = ((np.arange(5, dtype=np.float32)[:, None] / 5) ** np.arange(4) @ _CATMULL_ROM).astype(np.float32)


class View:
    """Where a head's points appear. Angles in radians, shifts in pixels of the finished image."""

    def __init__(self, yaw: float, pitch: float, tilt: float, scale: float, right: float, down: float) -> None:
        along, across = scale * PIXELS_PER_UNIT * math.cos(tilt), scale * PIXELS_PER_UNIT * math.sin(tilt)
        rolled = np.array([[along, across], [-across, along]], np.float32)
        self.of_point = np.array([[math.cos(yaw)], [math.cos(pitch)]], np.float32) * rolled
        self.of_depth = np.array([[math.sin(yaw), math.sin(pitch)]], np.float32) @ rolled
        self.centre = np.array([SIDE / 2 + right, SIDE / 2 + down], np.float32)

    def __call__(self, points: Array) -> Array:
        """Map points [n, 2] on the front of the head's ellipsoid to pixels of the finished image, float32 [n, 2]."""
        depth = np.sqrt(np.maximum(0, 0.64 - points**2 @ _FLATNESS))
        pixels: Array = points @ self.of_point + depth @ self.of_depth + self.centre
        return pixels


class Pen:
    """Draws shapes given in a face's coordinates: x to the right and y down, in units of half a head's height.

    Colours are RGB in 0 ... 255; on a grey image, one number. Widths are in pixels of the finished image.
    """

    def __init__(self, image: Image.Image, view: View) -> None:
        self.canvas, self.view, self.zoom = ImageDraw.Draw(image), view, image.width / SIDE

    def fill(self, points: Array, colour: Array | int) -> None:
        self.canvas.polygon(self._pixels(points).ravel().tolist(), fill=ink(colour))

    def ovals(self, x: float, y: float, half_width: float, half_height: float, colour: Array | int) -> None:
        """The same oval on both sides of the face, or one in its middle."""
        for centre in (-x, x) if x else (0.0,):
            self.fill(oval(centre, y, half_width, half_height), colour)

    def line(self, points: Array, colour: Array, width: float) -> None:
        path = self._pixels(points).ravel().tolist()
        self.canvas.line(path, fill=ink(colour), width=round(self.zoom * width), joint="curve")

    def lines(self, points: Array, colour: Array, width: float) -> None:
        """A line and its mirror image."""
        for side in (-1, 1):
            self.line(points * outline((side, 1)), colour, width)

    def strands(self, starts: Array, ends: Array, colour: Array, shades: Array) -> None:
        """Hairs from ``starts`` to ``ends``, both [n, 2], each darker or lighter by its shade in 0 ... 1."""
        paths = self._pixels(np.concatenate([starts, ends], axis=1).reshape(-1, 2)).reshape(-1, 4)
        colours = colour * (0.72 + 0.5 * shades[:, None]) + 12 * shades[:, None]
        for path, strand in zip(paths.tolist(), colours, strict=True):
            self.canvas.line(path, fill=ink(strand), width=3)

    def _pixels(self, points: Array) -> Array:
        return self.zoom * self.view(points)


def ink(colour: Array | int) -> int | tuple[int, ...]:
    """A colour in Pillow's form, opaque."""
    return colour if isinstance(colour, int) else (*np.clip(colour, 0, 255).astype(int).tolist(), 255)


def mix(first: Array, second: Array | np.float32, share: float | Array) -> Array:
    mixed: Array = first + (second - first) * share
    return mixed


def muted(draws: list[float], brightness: float) -> Array:
    """A greyish colour, as of walls and clothes."""
    hue = np.array(draws, np.float32)
    hue = mix(hue, hue.mean(), 0.6)
    colour: Array = (20 + 225 * brightness) * hue / hue.max()
    return colour


def outline(*points: tuple[float, ...]) -> Array:
    """Points, or colours, one a row."""
    return np.array(points, np.float32)


def symmetric(*right: tuple[float, float]) -> Array:
    """The whole outline of a shape, from its right half (top to bottom)."""
    return outline(*right, *[(-x, y) for x, y in right[::-1] if x])


def oval(x: float, y: float, half_width: float, half_height: float) -> Array:
    return _CIRCLE * outline((half_width, half_height)) + outline((x, y))


def smooth(points: Array) -> Array:
    """A smooth closed curve through the points (Catmull and Rom's spline), five points for each."""
    return _spline(points[-1:], points, points[:2])


def arc(*pairs: tuple[float, float]) -> Array:
    """A smooth curve from the first point to the last."""
    points = outline(*pairs)
    return np.concatenate([_spline(points[:1], points, points[-1:]), points[-1:]])


def _spline(*parts: Array) -> Array:
    points = np.concatenate(parts)
    windows = np.stack([points[i : len(points) - 3 + i] for i in range(4)], axis=1)
    curve: Array = (_SPLINE @ windows).reshape(-1, 2)
    return curve
