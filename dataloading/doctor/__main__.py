"""Says why loading is slow in a training script: any script with a ``DataLoader``, unchanged.

    python -m dataloading.doctor -- train.py --epochs 2
    python -m dataloading.doctor --seconds 60 -- -m package.module

The script runs for some seconds under watch, in one process, and is ended then. For each loader, by the line that made it, it is printed
whether training waits for it, where the time goes, in which lines, and what is wrong.

The exit status is 1 if something is wrong, 0 if nothing is, and 2 if the script failed or has no loader.
"""

from __future__ import annotations

import sys

from common.cli import command, parse, split_arguments
from common.errors import UsageError
from dataloading.doctor.examine import DoctorConfig, examine, require_script


@command
def main() -> None:
    own, script = split_arguments(sys.argv[1:], DoctorConfig)
    config = parse(DoctorConfig, "dataloading.doctor", __doc__, own)
    require_script(script)
    examined = examine(config, script, lambda line: print(line, flush=True))
    if examined.failed:
        raise UsageError(examined.failed)
    if examined.hangs or any(examined.causes.values()):
        sys.exit(1)
    print("nothing wrong was found")


if __name__ == "__main__":
    main()
