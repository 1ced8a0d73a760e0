"""The ledger of sharding: bytes that a rank holds, and bytes that it sends in a step (``python -m ddp.bench memory``).

Training with Adam takes 16 bytes for each parameter in fp32: its value, its gradient, and two moments. For P parameters on N
ranks, and 4 bytes each, the paper counts for a rank (arXiv 1910.02054, figure 1, for mixed precision there):

    replicas  16 P        every rank has everything
    ZeRO-1    8 P + 8 P/N     the moments are sharded
    ZeRO-2    4 P + 12 P/N    and the gradients
    ZeRO-3    16 P/N          and the parameters: less than a p-th is not possible

With ``--precision bf16``, parameters are gathered and used in two bytes while their slices stay in four. torch's optimizers take
gradients of the parameter's own dtype, so a slice's gradient has four bytes, where the paper counts two:

    ZeRO-1    4 P + 16 P/N    ZeRO-2    2 P + 16 P/N    ZeRO-3    16 P/N

What is counted is the memory of all tensors between backward and the optimizer's step, when nothing is in flight. The peak adds
activations, the units that are whole at the moment and the gradients in flight; the kernel counts it (VmHWM in proc(5)).
A second table has what there is within forward and backward only: activations, DDP's buckets (in which the gradients lie), the
largest unit of stage 3, and the most that it had gathered at a time. A third compares two layouts: slices of flat units, and a
shard of each parameter along its first dimension, as ``fully_shard`` has it.

``--limit 256MiB`` asks the other way round: what is the largest model, in layers, that trains within so much memory per rank? It is
found by search, and really trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.cli import parse
from common.reporting.benchmark import run_alone
from ddp.bench.memory.config import MemoryConfig


def main(argv: Sequence[str]) -> None:
    config = parse(MemoryConfig, "ddp.bench memory", __doc__, argv)
    if config.limit is None:
        from ddp.bench.memory import ledger, shards

        run_alone(
            "ddp.bench memory",
            config.output,
            lambda: (ledger.measure(config), shards.measure(config)),
            lambda taken: ledger.report(config, *taken),
        )
    else:
        from ddp.bench.memory import largest

        run_alone(
            "ddp.bench memory",
            config.output,
            lambda: largest.search(config),
            lambda taken: largest.report(config, taken),
        )
