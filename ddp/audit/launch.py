"""How a script is run on ranks, and the files that its processes load before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.command_line.cli import option
from common.foreign_script.run import injected
from common.foreign_script.start import STAND_IN, STARTS, environment_for

WATCH = Path(__file__).parent / "watch" / "__init__.py"
SYNC_BATCHNORM = Path(__file__).parents[1] / "sync_batchnorm.py"


@dataclass(frozen=True)
class RanksConfig:
    """Settings of ``ddp.audit.gpu``, and a part of those of ``ddp.audit``."""

    ranks: int = option(2, "ranks on which the script runs", minimum=1, maximum=64)
    start: str = option("auto", "who starts the ranks: torchrun, or python, where the script does", choices=STARTS)
    timeout: float = option(600.0, "seconds after which the script counts as hanging, and is ended", above=0)


def environment(device: str, ranks: int, arguments: Sequence[str], *files: Path) -> dict[str, str]:
    """The environment variables of ``python ARGUMENTS`` on so many ranks, whose processes load these files before the script.

    :param device: as in :func:`common.foreign_script.start.environment_for`; before a stand-in's files come its own
    """
    stand_in = [STAND_IN] if device == "stand-in" else []
    return environment_for(device, ranks, arguments, SYNC_BATCHNORM) | injected(*stand_in, *files)
