"""The ledger: what each variant holds and sends, beside the formulas."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup, preload
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, write_results
from common.reporting.benchmark_figures import plot_stacked
from common.training.gpt import GPT
from ddp.bench.memory import shards
from ddp.bench.memory.config import PARTS, MemoryConfig, formula
from ddp.bench.memory.passes import IN_PASSES, Activations, Gathered, formula_of_passes
from ddp.bench.memory.shards import Shards
from ddp.bench.memory.storages import all_tensors, bytes_of, process_bytes
from ddp.bench.sharding import STAGES, VOCABULARY, ShardedVariant, parameters_of
from ddp.bench.turns import set_malloc

# What torch would import on each rank of each group: half of what a group takes to start.
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.fsdp", "ddp.bench.memory.ledger")


@dataclass(frozen=True)
class Ledger:
    """What one rank holds and sends; bytes.

    :param resident: of each of :data:`PARTS`, between backward and step
    :param in_passes: of each of :data:`ddp.bench.memory.passes.IN_PASSES`, within forward and backward
    :param live: of all tensors that Python knows between backward and step
    :param peak: most memory that the process had from the beginning of the construction on, beyond what it had before
    :param sent: in a step, by the hand-written ring; 0 where that is not used
    """

    resident: dict[str, int]
    in_passes: dict[str, int]
    live: int
    peak: int
    sent: int


class LedgerWorker:
    """The service of one rank: builds one variant, trains it for some steps, and counts."""

    def __init__(self, env: DistEnv, config: MemoryConfig, stage: int | None) -> None:
        set_malloc(mmap_threshold=128 << 10)  # freed tensors go back to the kernel at once
        self._config, self._stage = config, stage

    def run(self, layers: int) -> Ledger:
        """Build a model of so many layers, train three steps, count. A collective, once in a process."""
        self._train(
            1, 64
        )  # what comes with the first step of a process is not the model's: code, caches, buffers of gloo
        gc.collect()
        before, live_before = process_bytes("VmRSS"), bytes_of(all_tensors())
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what there is now
        resident, in_passes, live, sent = self._train(layers, self._config.width)
        return Ledger(resident, in_passes, live - live_before, process_bytes("VmHWM") - before, sent)

    def _train(self, layers: int, width: int) -> tuple[dict[str, int], dict[str, int], int, int]:
        config = self._config
        size = (config.sequences, config.length)
        tokens, targets = (torch.randint(VOCABULARY, size) for _ in range(2))
        torch.manual_seed(0)
        with torch.device("meta" if self._stage != 0 else "cpu"):  # only replicas are whole anywhere
            network = GPT(VOCABULARY, width, layers, config.length)
        model = ShardedVariant(self._stage, "ring" if self._stage else "backend", config.low_precision).wrap(network)
        optimizer = torch.optim.AdamW(model.parameters())
        activations = Activations(network)
        gathered = Gathered(model) if self._stage == 3 else None
        for _ in range(3):
            sent_before = self._sent(model)
            with activations.recorded():
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            resident, live = self._resident(model, optimizer), bytes_of(all_tensors())
            optimizer.step()
            optimizer.zero_grad()
        sent = self._sent(model) - sent_before
        in_passes = {"activations": activations.nbytes}
        if self._stage == 0:
            reducer: Any = model.reducer
            in_passes["buckets"] = bytes_of(reducer.memory.values())
        if gathered is not None:
            in_passes |= {"largest unit": gathered.largest, "gathered": gathered.most}
        if self._stage:
            model.close()  # type: ignore[operator]
        return resident, in_passes, live, sent

    def _sent(self, model: Any) -> int:
        return sum(algorithm._p2p.sent_bytes for algorithm in model._collectives) if self._stage else 0

    def _resident(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        parameters: list[Tensor] = [*model.parameters()]
        gradients: list[Tensor] = [p.grad for p in model.parameters() if p.grad is not None]
        if self._stage:
            flats: Any = model.flats
            parameters += [flat.full for flat in flats]
            gradients += [flat.gradient for flat in flats if flat.gradient is not None]
        state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
        return dict(zip(PARTS, map(bytes_of, (parameters, gradients, state)), strict=True))


def measure(config: MemoryConfig) -> dict[int, dict[str, Ledger]]:
    """For each number of ranks and each variant, the ledger of rank 0."""
    preload(*LATE_IMPORTS)
    found: dict[int, dict[str, Ledger]] = {}
    with Progress(DistEnv.alone(CPU), "bench", len(config.ranks) * len(STAGES)) as progress:
        for ranks in map(int, config.ranks):
            found[ranks] = {}
            for name, stage in STAGES.items():
                # Processes of its own for each: the peak is that of a process.
                with WorkerGroup(ranks, LedgerWorker, config, stage, threads=1) as group:
                    found[ranks][name] = group.call("run", config.layers)[0]
                progress.advance(1, f"{name}, {ranks} ranks")
    return found


def report(config: MemoryConfig, found: dict[int, dict[str, Ledger]], layouts: list[Shards]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    parameters = parameters_of(config.width, config.layers, config.length)
    rows = []
    for ranks, ledgers in found.items():
        for name, ledger in ledgers.items():
            per_parameter = formula(STAGES[name], ranks, config.precision)
            expected = {part: value * parameters for part, value in per_parameter.items()}
            in_passes = formula_of_passes(config, STAGES[name])
            row = {"ranks": ranks, "variant": name, "formula": expected, "formula_of_passes": in_passes}
            rows.append(row | asdict(ledger))
    results = {"config": asdict(config), "parameters": parameters, "ledger": rows, "shards": list(map(asdict, layouts))}
    write_results(config.output / "memory.json", results)
    title = f"a transformer of {parameters / 1e6:.1f} M parameters, AdamW, {config.precision}"
    _draw(config.output / "memory.png", found, parameters, title)
    lines = [f"{title}; bytes per parameter on rank 0"]
    lines += _table_of_resident(rows, parameters, 2 if config.low_precision else 4)
    lines += ["within forward and backward, MiB on rank 0: measured / formula", *_table_of_passes(rows)]
    lines += [
        "by layout of the shards: what a rank holds and optimizes, beyond P / N, and what a step copies",
        *shards.table(layouts),
    ]
    return "\n".join([*lines, files_line(config.output, ["memory.json", "memory.png"])])


def _draw(path: Path, found: dict[int, dict[str, Ledger]], parameters: int, title: str) -> None:
    names = list(STAGES)
    plot_stacked(
        path,
        {
            f"{ranks} ranks": {part: [ledgers[name].resident[part] / parameters for name in names] for part in PARTS}
            for ranks, ledgers in found.items()
        },
        names,
        x_title="",
        y_title="bytes per parameter on a rank, between backward and step",
        title=title,
        points={
            f"{ranks} ranks": {"peak": [ledgers[name].peak / parameters for name in names]}
            for ranks, ledgers in found.items()
        },
    )


def _table_of_resident(rows: list[dict[str, Any]], parameters: int, sent_width: int) -> list[str]:
    """:param sent_width: bytes of an element that is sent"""
    lines = [_line("", (*PARTS, "together", "formula", "off by", "all tensors", "peak", "sent / P"))]
    for row in rows:
        together, expected = sum(row["resident"].values()), sum(row["formula"].values())
        cells = [f"{row['resident'][part] / parameters:.3f}" for part in PARTS]
        cells += [f"{together / parameters:.3f}", f"{expected / parameters:.3f}"]
        cells += [f"{100 * (together / expected - 1):+.2f} %", f"{row['live'] / parameters:.3f}"]
        cells.append(f"{row['peak'] / parameters:.2f}")
        cells.append(f"{row['sent'] / parameters / sent_width:.3f}" if row["sent"] else "")
        lines.append(_line(f"  {row['ranks']} ranks, {row['variant']}", cells))
    return lines


def _table_of_passes(rows: list[dict[str, Any]]) -> list[str]:
    lines = [_line("", IN_PASSES)]
    for row in rows:
        measured, expected = row["in_passes"], row["formula_of_passes"]
        cells = [
            f"{measured[name] / 2**20:.2f} / {expected[name] / 2**20:.2f}" if name in measured else ""
            for name in IN_PASSES
        ]
        lines.append(_line(f"  {row['ranks']} ranks, {row['variant']}", cells))
    return lines


def _line(name: str, cells: Iterable[str]) -> str:
    return f"{name:<24}" + "".join(f"{cell:>17}" for cell in cells)
