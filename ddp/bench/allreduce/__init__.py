"""The time of an all-reduce, by algorithm and size (``python -m ddp.bench allreduce``).

Every algorithm of ddp/all_reduce/choice.py and the backend's own sum the same tensors in the same processes, from 4 B to 100 MiB.
(On one host, the hierarchical one is shared memory, so it is left out.) For each size the algorithms take turns. A turn is a
barrier followed by consecutive all-reduces for at least 20 ms; its time is that of the slowest rank, divided by the number of
all-reduces.

Where each of two ranks or more gets a GPU, NCCL is measured alone: the algorithms by hand sum tensors of the CPU. ``--device
cuda`` with more ranks than GPUs lets ranks share a GPU, over gloo, which copies each tensor to the host and back.

A line, alpha + beta * bytes, is fitted to each algorithm's medians (alpha_beta.py). The bandwidth of the memory is
measured in the same processes: it bounds an all-reduce between processes that share memory, of tensors of the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.reporting.turns import run_benchmark
from ddp.bench.allreduce.config import AllReduceConfig
from ddp.bench.allreduce.measuring import measure, report


def main(argv: Sequence[str]) -> None:
    run_benchmark(AllReduceConfig, "ddp.bench allreduce", __doc__, argv, measure, report)
