"""Time a step of the trainer in two commits that take turns, and compare: is one slower?

    python -m maintain.same_speed BEFORE [AFTER] [--only NAME,...]

Each job of :mod:`maintain.same_bits` runs in both commits at once. One waits while the other takes a few steps, so a slow phase
of the machine affects both. A ratio is the time in AFTER by the time in BEFORE, of one round. Printed are its median, with the
quartiles, and the median's standard error. AFTER is HEAD by default; ``.`` is the working tree as it is at the start.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from common.benchmarking.timing import Spread, interleave, paired_ratios
from maintain.same_bits import JOBS, arguments, checkouts, environment

ROUNDS = 100


def main() -> None:
    config = arguments("same_speed", __doc__, "fp32,one-rank").parse_args()
    with checkouts(config.before, config.after) as pair:
        for name in config.only:
            with contextlib.ExitStack() as stack:
                turns = {checkout.name: stack.enter_context(timed_job(checkout, name)) for checkout in pair}
                seconds = interleave(turns, ROUNDS)
            ratios = paired_ratios(seconds["after"], seconds["before"])
            error = 1.25 * statistics.stdev(ratios) / ROUNDS**0.5  # of a median of normal values
            print(f"{name}: {Spread.of(ratios):.3f}, +-{error:.3f}", flush=True)


@contextlib.contextmanager
def timed_job(checkout: Path, name: str) -> Iterator[Callable[[], float]]:
    """A job that trains in a checkout while it is called; a call gives the seconds of a few steps."""
    script = Path(__file__).with_name("timed_steps.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={JOBS[name].ranks}"]
    command = [*torchrun, str(script), "--run-dir", str(checkout / "runs" / name), *JOBS[name].flags.split()]
    pipe, env = subprocess.PIPE, environment(checkout)
    with subprocess.Popen(command, cwd=checkout / "files", env=env, stdin=pipe, stdout=pipe, text=True) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdout is not None

        def turn() -> float:
            print(file=stdin, flush=True)
            return float(stdout.readline())

        yield turn  # at the end its input is closed, and it ends


if __name__ == "__main__":
    main()
