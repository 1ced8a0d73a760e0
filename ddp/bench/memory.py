"""The memory of sharding: bytes that a rank holds, and bytes that it sends in a step (``python -m ddp.bench memory``).

Training with Adam takes 16 bytes for each parameter in fp32: its value, its gradient, and two moments. For P parameters on W
ranks, and 4 bytes each, the paper counts for a rank (arXiv 1910.02054, figure 1, for mixed precision there):

    replicas  16 P        every rank has everything
    ZeRO-1    8 P + 8 P/W     the moments are sharded
    ZeRO-2    4 P + 12 P/W    and the gradients
    ZeRO-3    16 P/W          and the parameters: less than one part in W is not possible

We count the memory of parameters, gradients and optimizer state between backward and the optimizer's step, when nothing is in
flight. The peak adds activations, the units that are whole at the moment and the gradients in flight; the kernel counts it
(VmHWM in proc(5)).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.benchmarking.figures import plot_stacked
from common.benchmarking.turns import Rounds, table, write_report
from common.command_line.cli import option
from common.distributed.dist_env import DistEnv
from common.machine import set_malloc
from ddp.bench.sharding import STAGES, VOCABULARY, TransformerConfig, share
from ddp.rendezvous.worker_group import WorkerGroup, preload

PARTS = ("parameters", "gradients", "optimizer state")
# torch would import these on each rank of each group: half of what a group takes to start.
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "ddp.bench.memory")


@dataclass(frozen=True)
class Config(TransformerConfig):
    """Settings of ``ddp.bench memory``."""

    length: int = option(64, "tokens of a sequence", minimum=1)
    ranks: tuple[int, ...] = option((2, 3, 4), "numbers of ranks", minimum=1, maximum=8)
    output: Path = option(Path("runs/bench-memory"), "folder of the JSON and the figure")


def formula(stage: int | None, ranks: int) -> dict[str, float]:
    """Bytes of each of :data:`PARTS` per parameter, see the module's docstring.

    :param stage: 0 for replicas, None for ``fully_shard``, which is stage 3
    """
    shard = 4 / ranks
    values = 4.0 if stage in (0, 1, 2) else shard
    gradients = 4.0 if stage in (0, 1) else shard
    return dict(zip(PARTS, (values, gradients, 8.0 if stage == 0 else 2 * shard), strict=True))


class LedgerWorker:
    """The service of one rank: builds one variant, trains it for some steps, and counts."""

    def __init__(self, env: DistEnv, config: Config, stage: int | None) -> None:
        set_malloc(mmap_threshold=128 << 10)  # freed tensors go back to the kernel at once
        self._config, self._stage = config, stage

    def run(self) -> dict[str, Any]:
        """Build a model, train three steps, count. A collective, once in a process.

        :returns: ``resident``, the bytes of each of :data:`PARTS` between backward and step; ``peak``, the most memory that the
            process had from the beginning of the construction on, beyond what it had before; ``sent``, the bytes that the
            hand-written ring sends in a step, or 0 where that is not used
        """
        # The first step of a process takes memory that is not the model's: code, caches, buffers of gloo.
        self._train(replace(self._config, layers=1, width=64))
        gc.collect()
        before = process_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what there is now
        resident, sent = self._train(self._config)
        return {"resident": resident, "peak": process_bytes("VmHWM") - before, "sent": sent}

    def _train(self, config: Config) -> tuple[dict[str, int], int]:
        stage = self._stage
        tokens, targets = (torch.randint(VOCABULARY, (1, config.length)) for _ in range(2))
        torch.manual_seed(0)
        with torch.device("meta" if stage != 0 else "cpu"):  # only replicas are whole anywhere
            network = config.build()
        model: Any = share(network, stage, "ring" if stage else "backend")
        flats, rings = (model.flats, model._collectives) if stage else ([], [])
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            sent_before = sum(ring._p2p.sent_bytes for ring in rings)
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            parameters = [*model.parameters(), *(flat.whole for flat in flats)]
            gradients = [parameter.grad for parameter in model.parameters()] + [flat.gradient for flat in flats]
            counts = bytes_of(parameters), bytes_of(one for one in gradients if one is not None), state_of(optimizer)
            del parameters, gradients
            optimizer.step()
            optimizer.zero_grad()
        sent = sum(ring._p2p.sent_bytes for ring in rings) - sent_before
        if stage:
            model.close()
        return dict(zip(PARTS, counts, strict=True)), sent


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once. A ``DTensor`` counts by this rank's shard."""
    storages = (getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state."""
    values = (value for entry in optimizer.state.values() for value in entry.values())
    return bytes_of(value for value in values if isinstance(value, Tensor))


def process_bytes(name: str) -> int:
    """Bytes that /proc/self/status tells: VmRSS is the memory of the process, VmHWM its maximum."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(config: Config) -> list[dict[str, Any]]:
    """For each number of ranks and each variant, the ledger of rank 0, beside the bytes of the formula."""
    preload(*LATE_IMPORTS)
    parameters = config.parameters
    rows = []
    with Rounds(len(config.ranks) * len(STAGES)) as progress:
        for ranks in config.ranks:
            for name, stage in STAGES.items():
                # Processes of its own for each: the peak is that of a process.
                with WorkerGroup(ranks, LedgerWorker, config, stage, threads=1) as group:
                    ledger = group.call("run")[0]
                expected = {part: n * parameters for part, n in formula(stage, ranks).items()}
                rows.append({"ranks": ranks, "variant": name, "formula": expected, **ledger})
                progress.advance(1, f"{name}, {ranks} ranks")
    return rows


def report(config: Config, rows: list[dict[str, Any]]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    parameters = config.parameters
    title = f"a transformer of {parameters / 1e6:.1f} M parameters, AdamW, fp32"
    panels = {f"{ranks} ranks": [row for row in rows if row["ranks"] == ranks] for ranks in config.ranks}
    plot_stacked(
        config.output / "memory.png",
        {
            panel: {part: [row["resident"][part] / parameters for row in own] for part in PARTS}
            | {"more, at the peak": [(row["peak"] - sum(row["resident"].values())) / parameters for row in own]}
            for panel, own in panels.items()
        },
        list(STAGES),
        x_title="bytes per parameter on a rank: between backward and step, and at the peak (the number)",
        title=title,
    )
    columns: dict[str, dict[str, str]] = {}
    for row in rows:
        numbers = {part: row["resident"][part] for part in PARTS}
        numbers |= {"together": sum(row["resident"].values()), "formula": sum(row["formula"].values())}
        for heading, number in (numbers | {"peak": row["peak"], "sent": row["sent"]}).items():
            text = f"{number / parameters:.3f}" if number else ""
            columns.setdefault(heading, {})[f"{row['ranks']} ranks, {row['variant']}"] = text
    lines = [f"{title}; bytes per parameter on rank 0", *table(columns, 17, 26)]
    return write_report(config, "memory", {"parameters": parameters, "ledger": rows}, ["memory"], lines)
