"""Does a DDP wrapper do what torch's does? Checks of a wrapper of your own, each on real ranks.

    python -m ddp.conformance mypackage.mymodule:MyDDP       # a class, or a function: wrap(module, **options)
    python -m ddp.conformance                                # torch's own DistributedDataParallel
    python -m ddp.conformance ddp.by_hand:NaiveDistributedDataParallel --ranks 2,3,4 --only hooks,averages
    python -m ddp.conformance --list                         # the names of all checks, and what each proves

The wrapper is called as torch's is: with a module, and with options by their names. The checks look at `.grad` of the module's
parameters. If the first fails, the others are not run, since they build on it. A check is

- `not offered` if the wrapper lacks its option or its method, or raises NotImplementedError;
- `wrong` if a value is;
- `refused` if the wrapper raises any other error;
- `hung` if a rank does not answer within the time limit; its ranks are then killed.

The exit status is 1 if a check is wrong, refused or hung. The tracebacks are in the JSON, and what the ranks print is in the logs
beside it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.command_line.cli import command, option, parse
from common.command_line.stdout import print_results
from common.distributed.dist_env import require_alone
from common.files.run_directory import files_line, prepare_output, results_in

if TYPE_CHECKING:
    from ddp.conformance.check import Check
    from ddp.conformance.runner import Result

TORCH = "torch.nn.parallel:DistributedDataParallel"


@dataclass(frozen=True)
class ConformanceConfig:
    """Settings of ``ddp.conformance``."""

    ranks: tuple[int, ...] = option((2,), "numbers of ranks; every check runs at each", minimum=2, maximum=16)
    only: tuple[str, ...] | None = option(
        None, "run the checks whose name or topic contains one of these words (default: all)"
    )
    time_limit: float = option(20.0, "seconds until a check counts as hung", above=0, maximum=3600)
    list: bool = option(False, "list the checks instead of running them")
    output: Path = option(Path("runs/conformance"), "folder of the JSON and of the ranks' logs")


@command
def main() -> None:
    named = [argument for argument in sys.argv[1:2] if not argument.startswith("-")]
    wrapper = named[0] if named else TORCH
    config = parse(ConformanceConfig, "ddp.conformance [MODULE:CLASS]", __doc__, sys.argv[1 + len(named) :])
    require_alone("ddp.conformance")
    from ddp.conformance import report  # only now: it imports torch
    from ddp.conformance.runner import FAILED, load, selected

    checks = selected(config.only or ())
    if config.list:
        print(report.listing(checks))
        return
    load(wrapper)  # here first: what cannot be imported is said before ranks start
    results = run(wrapper, checks, config)
    with results_in(config.output):
        report.write_json(config.output, {"wrapper": wrapper, **asdict(config)}, results)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000  # a file gets whole messages
    counts = report.summary(results)
    files = files_line(config.output, (report.RESULTS_FILE, "rank*.log"))
    if left := len(checks) * len(config.ranks) - len(results):
        counts += f"; {left} more build on the first, and were not run (--only runs those that you name)"
    print_results(f"{report.table(results, columns)}\n\n{wrapper}: {counts}\n{files}")
    if any(result.status in FAILED for result in results):
        sys.exit(1)


def run(wrapper: str, checks: Sequence[Check], config: ConformanceConfig) -> list[Result]:
    """Run the checks at each number of ranks; the results of a check stand together."""
    import torch

    from common.distributed.dist_env import DistEnv
    from common.distributed.rank_logging import Progress, rank_logging
    from ddp.conformance.check import CHECKS
    from ddp.conformance.runner import PASS, Runner

    env = DistEnv.alone(torch.device("cpu"))
    results = []
    with rank_logging(env):
        prepare_output(config.output)
        for log in config.output.glob("rank*-of-*.log"):  # of an earlier run
            log.unlink()
        with Progress(env, "checks", len(checks) * len(config.ranks)) as progress:
            for ranks in config.ranks:
                with Runner(ranks, config.time_limit, config.output) as runner:
                    for check in checks:
                        results.append(runner.run(check, wrapper))
                        progress.advance(1, f"{ranks} ranks, {check.topic}")
                        if check is CHECKS[0] and results[-1].status != PASS:
                            break
    order = {check.name: index for index, check in enumerate(checks)}
    return sorted(results, key=lambda result: order[result.check])


if __name__ == "__main__":
    main()
