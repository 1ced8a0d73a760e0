"""Runs a script that is written for GPUs on CPU ranks, unchanged: a test of such a script needs no GPU.

    python -m ddp.audit.gpu -- train.py --epochs 2
    python -m ddp.audit.gpu --ranks 4 -- -m package.module

What the script prints goes to stderr. The exit status is the script's.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from common.command_line.cli import command, parse, split_arguments
from common.errors import UsageError
from common.foreign_script import start
from common.foreign_script.failure import why_failed
from ddp.audit import launch


@command
def main() -> None:
    own, script = split_arguments(sys.argv[1:], launch.RanksConfig)
    config = parse(launch.RanksConfig, "ddp.audit.gpu", __doc__, own)
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
