"""Time a step of the trainer in two commits that take turns, and compare: is one slower?

    python -m maintain.same_speed BEFORE [AFTER] [--only NAME,...] [--rounds N]

Each job of :mod:`maintain.same_bits` runs in both commits at once. One waits while the other takes a few steps, so a slow phase
of the machine affects both. A ratio is the time in AFTER by the time in BEFORE, of one round. Printed are its median, with the
quartiles, and the median's standard error. AFTER is HEAD by default; ``.`` is the working tree as it is at the start.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from pathlib import Path

from common.reporting.timing import Spread, interleave, paired_ratios
from maintain.same_bits import JOBS, checkouts, environment, require_commits

STEPS = 6  # of a turn
TRAINED = ["--device", "cpu", "--batch-size", "144", "--epochs", "1000000"]


def main() -> None:
    parser = ArgumentParser("python -m maintain.same_speed", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("before", metavar="BEFORE", help="a commit, or . for the working tree")
    parser.add_argument("after", metavar="AFTER", nargs="?", default="HEAD", help="the same (default: HEAD)")
    parser.add_argument(
        "--only", metavar="NAME,...", default="fp32,one-rank", help="jobs of same_bits (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=60, help="turns of each commit (default: %(default)s)")
    config = parser.parse_args()
    require_commits(parser, config.before, config.after)
    with checkouts(config.before, config.after) as pair:
        for name in config.only.split(","):
            with contextlib.ExitStack() as stack:
                turns = {checkout.name: stack.enter_context(timed_job(checkout, name)) for checkout in pair}
                seconds = interleave(turns, config.rounds)
            ratios = paired_ratios(seconds["after"], seconds["before"])
            error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median of normal values
            step = statistics.median(seconds["before"]) / STEPS
            print(f"{name}: {Spread.of(ratios):.3f}, +-{error:.3f}; {1000 * step:.1f} ms a step before", flush=True)


@contextlib.contextmanager
def timed_job(checkout: Path, name: str) -> Iterator[Callable[[], float]]:
    """A job that trains in a checkout while it is called; a call gives the seconds of a few steps."""
    job, script = JOBS[name], Path(__file__).with_name("timed_steps.py")
    ranks = ["-m", "torch.distributed.run", f"--nproc_per_node={job.ranks}"] if job.ranks > 1 else []
    flags = [*TRAINED, "--run-dir", str(checkout / "runs" / name), *job.flags.split()]
    with subprocess.Popen(
        [sys.executable, *ranks, str(script), str(STEPS), *flags],
        cwd=checkout / "files",
        env=environment(checkout),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def turn() -> float:
            print(file=process.stdin, flush=True)
            return float(process.stdout.readline())  # type: ignore[union-attr]

        yield turn  # at the end its input is closed, and it ends


if __name__ == "__main__":
    main()
