"""The ladder beside ``ddp.train`` and other libraries, as in their documentation (``python -m maintain.libraries``).

Accelerate and Lightning are the extra ``libraries``. Theirs and the script of torch's DDP tutorial, which is the first rung with two
ranks, fetch a sample at a time, in the main process. (Like all rungs, the script does not broadcast buffers before each step.)
"""

from __future__ import annotations

import functools
import importlib.util
import statistics

from common.benchmarking.turns import cells, ratios, run_benchmark, table
from common.command_line.cli import command
from common.errors import UsageError
from ddp.ladder import __main__ as ladder
from ddp.ladder.__main__ import LadderConfig, Variants, measure, rates_of
from ddp.ladder.rungs import RANKS, Rung, RungTraining, Turn, one_by_one
from maintain.libraries.trainings import AccelerateTraining, LightningTraining, OurTraining

OURS: Variants = {
    "ddp.train": (OurTraining, {}),
    "ddp.train --fast --precision fp32": (OurTraining, {"fast": True, "precision": "fp32"}),
    "ddp.train --fast": (OurTraining, {"fast": True}),
}
PEERS: Variants = {
    "torch's DDP tutorial": (RungTraining, Rung(one_by_one, ranks=RANKS)),
    "accelerate": (AccelerateTraining, None),
    "lightning": (LightningTraining, None),
}

GROUPS = {
    "ddp.train, two ranks": {name: f"{name} (bf16)" if name == "ddp.train --fast" else name for name in OURS},
    "other scripts and libraries, two ranks": {name: name for name in PEERS},
}


@command
def main() -> None:
    if not all(map(importlib.util.find_spec, ("accelerate", "lightning"))):
        raise UsageError("the other libraries are not installed: pip install -e '.[libraries]'")
    everyone = functools.partial(measure, others={**OURS, **PEERS})
    run_benchmark(LadderConfig, "maintain.libraries", __doc__, None, everyone, report)


def report(config: LadderConfig, turns: dict[str, list[Turn]]) -> str:
    """The ladder's report, and all rates as multiples of those of the fastest peer."""
    rates = rates_of(turns)
    best = max(PEERS, key=lambda name: statistics.median(rates[name]))
    compared = table({f"of {best}'s": cells(ratios(rates, best), ".2f")}, 36, 37)
    return "\n".join([*compared, ladder.report(config, turns, GROUPS)])


if __name__ == "__main__":
    main()
