"""The memory of sharding: bytes that a rank holds, and bytes that it sends in a step (``python -m ddp.bench memory``).

Training with Adam takes 16 bytes for each parameter in fp32: its value, its gradient, and two moments. For P parameters on N
ranks, and 4 bytes each, the paper counts for a rank (arXiv 1910.02054, figure 1, for mixed precision there):

    replicas  16 P        every rank has everything
    ZeRO-1    8 P + 8 P/N     the moments are sharded
    ZeRO-2    4 P + 12 P/N    and the gradients
    ZeRO-3    16 P/N          and the parameters: less than an N-th is not possible

With ``--precision bf16``, parameters are gathered and used in two bytes while their shards stay in four. torch's optimizers take
gradients of the parameter's own dtype, so a shard's gradient has four bytes, where the paper counts two:

    ZeRO-1    4 P + 16 P/N    ZeRO-2    2 P + 16 P/N    ZeRO-3    16 P/N

We count the memory of parameters, gradients and optimizer state between backward and the optimizer's step, when nothing is in
flight. The peak adds activations, the units that are whole at the moment and the gradients in flight; the kernel counts it
(VmHWM in proc(5)).

``--limit 256MiB`` asks the other way round: what is the largest model, in layers, that trains within so much memory per rank? It is
found by bisection, and really trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.reporting.turns import run_benchmark
from ddp.bench.memory import largest, ledger


def main(argv: Sequence[str]) -> None:
    run_benchmark(ledger.MemoryConfig, "ddp.bench memory", __doc__, argv, measure, report)


def measure(config: ledger.MemoryConfig) -> Any:
    """The ledger, or with a limit the largest models."""
    return (ledger if config.limit is None else largest).measure(config)


def report(config: ledger.MemoryConfig, measured: Any) -> str:
    """Write the results, and return the summary to print."""
    return ledger.report(config, measured) if config.limit is None else largest.report(config, measured)
