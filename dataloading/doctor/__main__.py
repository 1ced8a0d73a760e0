"""Says why loading is slow in a training script: any script with a ``DataLoader``, unchanged.

    python -m dataloading.doctor -- train.py --epochs 2
    python -m dataloading.doctor --seconds 60 -- -m package.module

The script runs for some seconds under watch, in one process, and is ended then. For each loader, by the line that made it, it is printed
whether training waits for it, where the time goes, in which lines, and what is wrong. For those that it waits for, other settings are
tried in the script's own loop. The best is put into another run from outside, whose time is predicted before.

The exit status is 1 if something is wrong, 0 if nothing is, and 2 if the script failed or has no loader.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.command_line.cli import command, parse, split_arguments
from common.errors import UsageError
from common.foreign_script.failure import short
from common.foreign_script.start import require_script
from dataloading.doctor.examine import DoctorConfig, Examined, examine, launch

UNLIKE = 1.5  # times as many batches/s as in the script's own run: the turns have missed its rare slow samples


@command
def main() -> None:
    own, script = split_arguments(sys.argv[1:], DoctorConfig)
    config = parse(DoctorConfig, "dataloading.doctor", __doc__, own)
    require_script(script, "dataloading.doctor")
    examined = examine(config, script, lambda line: print(line, flush=True))
    if examined.failed:
        raise UsageError(examined.failed)
    if not examined.hangs and config.trials:
        advise(config, script, examined)
    if examined.hangs or any(examined.causes.values()):
        sys.exit(1)
    print("nothing wrong was found")


def advise(config: DoctorConfig, script: Sequence[str], examined: Examined) -> None:
    """Try settings for the loaders that matter, and check the best in a run of the script."""
    from dataloading.doctor.check import check_best  # torch, which --help does without
    from dataloading.doctor.script_run import Script
    from dataloading.doctor.trials import try_settings

    arguments, environment, needed = launch(config, script)
    for loader in examined.loaders:
        if loader.matters and loader.line:
            tried = try_settings(run := Script(arguments, environment, loader.line, tuple(needed)), config.trials)
            started_s = sum(loader.starts()) if loader.facts["workers"] else 0.0
            batches, steady_s = len(loader.all("batch")), loader.loop_s - started_s  # 0 s if it looked at one batch
            if tried.now * steady_s > UNLIKE * batches:
                print(
                    f"these turns settle nothing: they gave {tried.now:.1f} batches/s where the script's loop had "
                    f"{batches / steady_s:.1f}, so what is slow there was in none of them",
                    flush=True,
                )
            else:
                print(*map(short, tried.lines), sep="\n", flush=True)
                if tried.gains:
                    check_best(run, tried, config.seconds)


if __name__ == "__main__":
    main()
