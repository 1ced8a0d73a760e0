"""Time the same benchmark in two commits, turn by turn, and compare: is one slower?

    python -m maintain.same_speed before [after] [--turns N]

Each turn runs ``ddp.bench overhead`` (a step of the trainer, on one rank and on two) once in either commit, in alternating
order. A ratio is the time in ``after`` by the time in ``before``, of one turn. Printed are the ratios' medians with their quartiles.
``after`` is HEAD by default; ``.`` is the working tree as it is at the start.
"""

from __future__ import annotations

import json
import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from common.reporting.timing import Spread
from maintain.same_bits import checkouts, require_commits, run

OVERHEAD = "--builds 1 --rounds 4 --steps 25 --device cpu --output bench"
TORCHRUN = ("torch.distributed.run", "--nproc_per_node=2", "-m")


def main() -> None:
    parser = ArgumentParser("python -m maintain.same_speed", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit, or . for the working tree")
    parser.add_argument("after", nargs="?", default="HEAD", help="the same (default: HEAD)")
    parser.add_argument("--turns", type=int, default=6, help="(default: %(default)s)")
    config = parser.parse_args()
    require_commits(parser, config.before, config.after)
    ratios: dict[str, list[float]] = {}
    with checkouts(config.before, config.after) as pair:
        for turn in range(config.turns):
            order = pair if turn % 2 == 0 else pair[::-1]
            seconds = {checkout: step_seconds(checkout) for checkout in order}
            before, after = (seconds[checkout] for checkout in pair)
            for name in before:
                ratios.setdefault(name, []).append(after[name] / before[name])
            print(f"turn {turn + 1} of {config.turns} is over", flush=True)
    for name, values in ratios.items():
        print(f"the trainer's step, {name}: {Spread.of(values):.3f}")


def step_seconds(checkout: Path) -> dict[str, float]:
    """Median seconds of the trainer's step, by the number of ranks."""
    found = {}
    for name, torchrun in (("one rank", ()), ("two ranks", TORCHRUN)):
        run(checkout, [*torchrun, "ddp.bench", "overhead", *OVERHEAD.split()])
        written = json.loads((checkout / "files" / "bench" / "overhead.json").read_text())
        found[name] = statistics.median(written["seconds_per_step"]["trainer"])
    return found


if __name__ == "__main__":
    main()
