"""Runs a script that is written for GPUs on CPU ranks, unchanged: a test of such a script needs no GPU.

    python -m ddp.audit.gpu -- train.py --epochs 2
    python -m ddp.audit.gpu --ranks 4 -- -m package.module

What the script prints goes to stderr. The exit status is the script's.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.command_line.cli import command, option, parse, split_arguments
from common.errors import UsageError
from common.foreign_script import start
from common.foreign_script.failure import why_failed
from ddp.audit import launch


@dataclass(frozen=True)
class GPUConfig:
    """Settings of ``ddp.audit.gpu``."""

    ranks: int = option(2, "ranks on which the script runs, each with a GPU", minimum=1, maximum=64)
    start: str = option(
        "auto", "who starts the ranks: torchrun, or python, where the script does", choices=start.STARTS
    )
    timeout: float = option(600.0, "seconds after which the run is stopped", above=0)


@command
def main() -> None:
    own, script = split_arguments(sys.argv[1:], GPUConfig)
    config = parse(GPUConfig, "ddp.audit.gpu", __doc__, own)
    start.require_script(script, "ddp.audit.gpu")
    environment = launch.environment("stand-in", config.ranks, script)
    with tempfile.TemporaryDirectory() as folder:
        outcome = start.run_ranks(script, config.ranks, config.start, environment, config.timeout, Path(folder))
    if outcome.status is None:
        raise UsageError(f"{' '.join(script)} did not end within {outcome.seconds:.0f} s")
    if outcome.status:
        print(why_failed(outcome), file=sys.stderr)
    sys.exit(outcome.status)


if __name__ == "__main__":
    main()
