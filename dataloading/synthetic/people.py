"""Who the embedded faces belong to: made-up people, their names, how many images there are of each, and their features."""

from __future__ import annotations

import math

import numpy as np

from common.training.randomness import uniform
from dataloading.synthetic.drawing import blend_along, mix, rgb

IDENTITIES = 1000

_FIRST_NAMES = (
    "Addison Alex Andrea Ariel Ash Bao Blair Casey Charlie Dana Devon Eden Ellis Emery Finley Frankie Gray Harper Hiro "
    "Indigo Jamie Jordan Kai Kim Lee Logan Mika Morgan Nico Noor Parker Quinn Remy Riley Robin Rowan Sasha Sky Toni Yuki"
)
_LAST_NAME_STARTS = "Ald Bram Cor Dun Eld Fen Gar Hol Ing Jar Kel Lind Mar Nor Oster"
_LAST_NAME_ENDS = "aby ander berg enko ero field gard iani imoto owe ski sen ston wick yan"

_SKINS = np.array([(238, 200, 172), (226, 178, 142), (212, 160, 120), (172, 118, 80), (128, 84, 58), (92, 60, 44)])
_HAIRS = np.array(
    [(28, 24, 26), (58, 38, 28), (98, 62, 38), (146, 74, 40), (204, 160, 96), (150, 148, 148), (226, 222, 214)]
)
_IRISES = np.array([(58, 36, 22), (100, 66, 34), (112, 112, 56), (74, 122, 88), (70, 118, 168), (118, 132, 142)])
_HAIRLINES = ("straight", "parted", "curtain", "receding", "bald")
_LENGTHS = ("short", "short", "bob", "long", "bun", "afro")
_BEARDS = ("none", "none", "none", "stubble", "moustache", "goatee", "full")


def name_of(identity: int) -> str:
    """``"First_Last"``, made up and unique among the :data:`IDENTITIES`.

    :raises IndexError: for an identity that is not in 0 ... IDENTITIES - 1
    """
    _check(identity)
    firsts, starts, ends = _FIRST_NAMES.split(), _LAST_NAME_STARTS.split(), _LAST_NAME_ENDS.split()
    # a stride that shares no factor with the number of names visits them all before one comes again
    last, first = divmod(identity * 7919 % (len(firsts) * len(starts) * len(ends)), len(firsts))
    start, end = divmod(last, len(ends))
    return f"{firsts[first]}_{starts[start]}{ends[end]}"


def images_of(identity: int) -> int:
    """How many images there are of a person: the first 24 have at least 40 each, nine of ten of the rest one or two.

    :raises IndexError: for an identity that is not in 0 ... IDENTITIES - 1
    """
    _check(identity)
    return max(1, round(40 * math.pow(53.4 / (identity + 30), 2.5)))


def _check(identity: int) -> None:
    if not 0 <= identity < IDENTITIES:
        raise IndexError(f"identity {identity} is not in 0 ... {IDENTITIES - 1}")


IMAGES = sum(images_of(identity) for identity in range(IDENTITIES))


class Person:
    """What stays the same from image to image. Lengths in units of half a head's height, colours RGB 0 ... 255."""

    def __init__(self, seed: int, identity: int) -> None:
        key = (seed, "faces-person", identity)
        skin, hair, iris, lips, self.glasses, old = uniform(6, *key, "colours").tolist()
        self.skin = blend_along(_SKINS, skin)
        self.hair = blend_along(_HAIRS[:-2], hair * (1 - 0.7 * skin)) if old < 0.8 else blend_along(_HAIRS[-2:], hair)
        self.iris = blend_along(_IRISES, iris * (1 - 0.7 * skin))
        self.lips = mix(self.skin, rgb(176, 40, 52), 0.12 + 0.5 * lips**2)
        self.wrinkles = max(0.0, old - 0.6)

        hairline, length, beard = uniform(3, *key, "kinds").tolist()
        self.hairline = _HAIRLINES[int(len(_HAIRLINES) * hairline)]
        self.length = _LENGTHS[int(len(_LENGTHS) * length)]
        if self.hairline in ("receding", "bald"):
            self.length = "short"
        self.beard = _BEARDS[int(len(_BEARDS) * beard)] if self.length in ("short", "afro") else "none"
        self.strands = uniform(3, *key, np.arange(70))

        shape = uniform(16, *key, "shape").tolist()
        self.width = 0.68 + 0.16 * shape[0]
        self.jaw = 0.42 + 0.22 * shape[1]
        self.chin = 0.16 + 0.2 * shape[2]
        self.hairline_height = -0.5 - 0.2 * shape[3]
        self.volume = 0.1 + 0.16 * shape[4]
        self.eye_gap = 0.27 + 0.08 * shape[5]
        self.eye_size = 0.135 + 0.05 * shape[6]
        self.eye_slant = 0.03 - 0.05 * shape[7]
        self.brow_height = -0.24 - 0.08 * shape[8]
        self.brow_weight = 0.025 + 0.05 * shape[9]
        self.brow_arch = 0.02 + 0.09 * shape[10]
        self.nose_length = 0.24 + 0.14 * shape[11]
        self.nose_width = 0.11 + 0.1 * shape[12]
        self.mouth_width = 0.22 + 0.12 * shape[13]
        self.lip_fullness = 0.5 + shape[14]
        self.ears = 0.09 + 0.08 * shape[15]
