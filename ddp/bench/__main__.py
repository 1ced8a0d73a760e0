"""Benchmarks of data-parallel training, each a command that anyone can run.

    python -m ddp.bench overhead                       # what the trainer costs on top of the mathematics
    torchrun --nproc_per_node=2 -m ddp.bench overhead  # the same with gradients crossing between two ranks
    python -m ddp.bench strategies                     # one process, many devices, many processes: why two is not twice
    python -m ddp.bench allreduce                      # all-reduce algorithms from 4 B to 100 MiB, and what bounds them
    python -m ddp.bench engines                        # the hand-written DDP against torch's, on four models
    torchrun --nproc_per_node=2 -m ddp.bench safety    # what checkpoints, flags and the watchdog cost

Candidates run interleaved in one command, in an order that rotates; results are medians and round-by-round ratios.
"""

from __future__ import annotations

import sys

from common.cli import command
from common.errors import UsageError
from ddp.bench.allreduce import main as allreduce
from ddp.bench.engines import main as engines
from ddp.bench.overhead import main as overhead
from ddp.bench.safety import main as safety
from ddp.bench.strategies import main as strategies

BENCHMARKS = {
    "overhead": overhead,
    "strategies": strategies,
    "allreduce": allreduce,
    "engines": engines,
    "safety": safety,
}


@command
def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(f"{__doc__}\nbenchmarks: {', '.join(BENCHMARKS)} (NAME --help lists its options)")
    elif name in BENCHMARKS:
        BENCHMARKS[name](arguments)
    else:
        raise UsageError(f"unknown benchmark {name!r}: there is {', '.join(BENCHMARKS)}")


if __name__ == "__main__":
    main()
