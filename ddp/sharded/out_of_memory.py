"""Out of memory at a unit: the error says which unit, how many bytes it needs whole, and what to do.

torch's own error says how many bytes it could not have, but not for what. gloo's collectives take memory too: a copy of the unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def memory_for(unit: str, nbytes: int) -> Iterator[None]:
    """A block that allocates memory for the whole parameters, or the whole gradients, of a unit.

    :param unit: its name, see :class:`ddp.sharded.units.Unit`
    :param nbytes: of its whole parameters
    :raises RuntimeError: in place of torch's, when there is too little memory (``torch.OutOfMemoryError`` on a GPU)
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        what = f"the unit {unit}" if unit else "the root (what lies in no unit)"
        raise type(error)(
            f"out of memory: {what} needs {nbytes:,} bytes for its whole parameters, and as many elements for their gradients; "
            "at stage 3 a rank holds two units at a time. Make units smaller: list more and smaller submodules in units="
        ) from error
