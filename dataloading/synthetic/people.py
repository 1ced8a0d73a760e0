"""The made-up people of the drawn faces: their names, and the number of images of each."""

from __future__ import annotations

import math

IDENTITIES = 1000

_FIRST_NAMES = (
    "Addison Alex Andrea Ariel Ash Bao Blair Casey Charlie Dana Devon Eden Ellis Emery Finley Frankie Gray Harper Hiro "
    "Indigo Jamie Jordan Kai Kim Lee Logan Mika Morgan Nico Noor Parker Quinn Remy Riley Robin Rowan Sasha Sky Toni Yuki"
)
_LAST_NAME_STARTS = "Ald Bram Cor Dun Eld Fen Gar Hol Ing Jar Kel Lind Mar Nor Oster"
_LAST_NAME_ENDS = "aby ander berg enko ero field gard iani imoto owe ski sen ston wick yan"


def name_of(identity: int) -> str:
    """``"First_Last"``, unique among the :data:`IDENTITIES`.

    :raises IndexError: for an identity that is not in 0 ... IDENTITIES - 1
    """
    _check(identity)
    firsts, starts, ends = _FIRST_NAMES.split(), _LAST_NAME_STARTS.split(), _LAST_NAME_ENDS.split()
    # The stride shares no factor with the number of names, so no name comes twice.
    last, first = divmod(identity * 7919 % (len(firsts) * len(starts) * len(ends)), len(firsts))
    start, end = divmod(last, len(ends))
    return f"{firsts[first]}_{starts[start]}{ends[end]}"


def images_of(identity: int) -> int:
    """The number of images of a person: at least 40 for each of the first 24, one or two for nine tenths of the others.

    :raises IndexError: for an identity that is not in 0 ... IDENTITIES - 1
    """
    _check(identity)
    return max(1, round(40 * math.pow(53.4 / (identity + 30), 2.5)))


def _check(identity: int) -> None:
    if not 0 <= identity < IDENTITIES:
        raise IndexError(f"identity {identity} is not in 0 ... {IDENTITIES - 1}")


IMAGES = sum(images_of(identity) for identity in range(IDENTITIES))
