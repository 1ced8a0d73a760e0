"""A person of the drawn faces: the features that all of their images share, as a function of (seed, identity)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from common.randomness import uniform
from dataloading.synthetic.drawing import Array, mix, outline, smooth, symmetric

# Rows of colours, RGB 0 ... 255; a person's colour lies between two neighbours.
_SKINS = outline((238, 200, 172), (226, 178, 142), (212, 160, 120), (172, 118, 80), (128, 84, 58), (92, 60, 44))
_HAIRS = outline((28, 24, 26), (58, 38, 28), (98, 62, 38), (146, 74, 40), (204, 160, 96))
_GREY_HAIRS = outline((150, 148, 148), (226, 222, 214))
_IRISES = outline((58, 36, 22), (100, 66, 34), (112, 112, 56), (74, 122, 88), (70, 118, 168), (118, 132, 142))
_LIPS = outline((176, 40, 52))[0]
_HAIRLINES = ("straight", "parted", "curtain", "receding", "bald")
_LENGTHS = ("short", "short", "bob", "long", "bun", "afro")
_BEARDS = ("none", "none", "none", "stubble", "moustache", "goatee", "full")
# fmt: off
_SHAPE = {  # lengths in units of half a head's height: the value for a draw of 0, and the change for a draw of 1
    "width": (0.68, 0.16), "jaw": (0.42, 0.22), "chin": (0.16, 0.2), "hairline_height": (-0.5, -0.2), "volume": (0.1, 0.16),
    "eye_gap": (0.27, 0.08), "eye_size": (0.135, 0.05), "eye_slant": (0.03, -0.05), "brow_height": (-0.24, -0.08),
    "brow_weight": (0.025, 0.05), "brow_arch": (0.02, 0.09), "nose_length": (0.24, 0.14), "nose_width": (0.11, 0.1),
    "mouth_width": (0.22, 0.12), "lip_fullness": (0.5, 1.0), "ears": (0.09, 0.08),
}
# fmt: on


class Person(SimpleNamespace):
    """The features that all images of a person share: those of :data:`_SHAPE`, colours, and the kinds of hair and beard."""

    def __init__(self, seed: int, identity: int) -> None:
        key = (seed, "faces-person", identity)
        draws = uniform(len(_SHAPE), *key, "shape").tolist()
        super().__init__(**{n: low + span * u for (n, (low, span)), u in zip(_SHAPE.items(), draws, strict=True)})
        skin, hair, iris, lips, self.glasses, old = uniform(6, *key, "colours").tolist()
        self.skin = _color_at(_SKINS, skin)
        self.hair = _color_at(_HAIRS, hair * (1 - 0.7 * skin)) if old < 0.8 else _color_at(_GREY_HAIRS, hair)
        self.iris = _color_at(_IRISES, iris * (1 - 0.7 * skin))
        self.lips = mix(self.skin, _LIPS, 0.12 + 0.5 * lips**2)
        self.wrinkles = max(0.0, old - 0.6)
        hairline, length, beard = uniform(3, *key, "kinds").tolist()
        self.hairline = _HAIRLINES[int(len(_HAIRLINES) * hairline)]
        receding = self.hairline in ("receding", "bald")
        self.length = "short" if receding else _LENGTHS[int(len(_LENGTHS) * length)]
        self.beard = _BEARDS[int(len(_BEARDS) * beard)] if self.length in ("short", "afro") else "none"
        self.strands = uniform(3, *key, np.arange(70))

        w = self.width  # from the crown down to the chin
        skull = (0, -1.04), (0.62 * w, -0.92), (0.97 * w, -0.5), (w, -0.05), (0.94 * w, 0.35)
        self.outline = smooth(symmetric(*skull, (self.jaw + 0.04, 0.7), (self.chin, 0.97), (0, 1.02)))


def _color_at(colours: Array, position: float) -> Array:
    """The colour at ``position`` in 0 ... 1 of the way along a row of colours."""
    index, share = divmod(position * (len(colours) - 1), 1)
    return mix(colours[int(index)], colours[min(int(index) + 1, len(colours) - 1)], share)
