"""The files that the processes of a script load before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.foreign_script.run import injected
from common.foreign_script.start import STAND_IN, environment_for

WATCH = Path(__file__).parent / "watch" / "__init__.py"
SYNC_BATCHNORM = Path(__file__).parents[1] / "sync_batchnorm.py"


def environment(device: str, ranks: int, arguments: Sequence[str], *files: Path) -> dict[str, str]:
    """The environment variables of ``python ARGUMENTS`` on so many ranks, whose processes load these files before the script.

    :param device: as in :func:`common.foreign_script.start.environment_for`; before a stand-in's files come its own
    """
    stand_in = [STAND_IN] if device == "stand-in" else []
    return environment_for(device, ranks, arguments, SYNC_BATCHNORM) | injected(*stand_in, *files)
