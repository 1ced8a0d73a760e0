"""Benchmarks of data-parallel training, one command each.

    python -m ddp.bench overhead                       # the trainer's cost on top of the mathematics
    torchrun --nproc_per_node=2 -m ddp.bench overhead  # the same, with the all-reduce between two ranks
    python -m ddp.bench scaling                        # one process, many devices, many processes: why two is not twice
    python -m ddp.bench allreduce                      # all-reduce algorithms from 4 B to 100 MiB, and their bounds
    python -m ddp.bench engines                        # the hand-written DDP against torch's, on four models, and their parts
    python -m ddp.bench sharding                       # ZeRO-1, 2, 3 by hand against replicas and fully_shard
    python -m ddp.bench memory                         # what a rank holds and sends at each stage, and the formulas
    python -m ddp.bench batch                          # the test error when the global batch grows, by rules for the rate
    torchrun --nproc_per_node=2 -m ddp.bench safety    # the cost of checkpoints, flags and the watchdog

All variants of a benchmark run in one command and take turns in a rotating order. Results are medians and round-by-round
ratios.
"""

from __future__ import annotations

import importlib
import sys

from common.benchmarking.turns import run_benchmark
from common.command_line.cli import command
from common.errors import UsageError

ON_RANKS = ("overhead", "safety")  # which torchrun may start; the others start their own processes
BENCHMARKS = (*ON_RANKS, "scaling", "allreduce", "engines", "sharding", "memory", "batch")
MOVED = {"costs": "engines", "strategies": "scaling"}


@command
def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}\nbenchmarks: {', '.join(BENCHMARKS)} (NAME --help lists its options)")
        return
    if name in MOVED:
        raise UsageError(f"{name} is part of {MOVED[name]} now: python -m ddp.bench {MOVED[name]}")
    if name not in BENCHMARKS:
        raise UsageError(f"unknown benchmark {name!r}: there is {', '.join(BENCHMARKS)}")
    # Each benchmark is a module of that name. Only the requested one is imported, so that --help stays fast.
    one = importlib.import_module(f"ddp.bench.{name}")
    if name in ON_RANKS:
        one.main(arguments)
    else:
        run_benchmark(one.Config, f"ddp.bench {name}", one.__doc__, arguments, one.measure, one.report)


if __name__ == "__main__":
    main()
