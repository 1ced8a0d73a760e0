"""Benchmarks of data-parallel training, each a command that anyone can run.

    python -m ddp.bench overhead                       # what the trainer costs on top of the mathematics
    torchrun --nproc_per_node=2 -m ddp.bench overhead  # the same with gradients crossing between two ranks

Candidates run interleaved in one process, in an order that rotates; results are medians and round-by-round ratios.
"""

from __future__ import annotations

import sys

from common.cli import UsageError, command
from ddp.bench_overhead import main as overhead

BENCHMARKS = {"overhead": overhead}


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
