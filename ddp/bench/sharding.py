"""The stages of sharding by hand against replicas and torch's ``fully_shard``, by the time of a step (``python -m ddp.bench sharding``).

Every variant trains its own copy of one small transformer on one batch of tokens that is already in memory: forward, backward,
optimizer step. All live in the same processes and take turns. A turn begins with a barrier; its time is that of the slowest
rank, per step. malloc is told to keep freed memory, as in ``ddp.bench engines``: stages 2 and 3 free and allocate in every
step, and page faults would be most of what is measured.

ZeRO-1 and 2 send as many bytes as replicas, in two halves; ZeRO-3 sends half as many again. On gloo each sends more, since a
reduce-scatter there is a whole all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from common.cli import option, parse
from common.cores import usable_cores
from common.distributed.process_group import DistEnv
from common.distributed.rank_logging import Progress
from common.distributed.worker_group import WorkerGroup
from common.files.run_directory import files_line
from common.reporting.benchmark import CPU, run_alone, write_results
from common.reporting.benchmark_figures import plot_ratios
from common.reporting.timing import Spread, interleave, paired_ratio, paired_ratios
from common.training.gpt import GPT
from common.training.models import require_heads
from ddp.bench.turns import SETTLING_STEPS, WARMUP, VariantTurn, keep_freed_memory, timed_steps

VOCABULARY = 96  # printable characters


@dataclass(frozen=True)
class ShardedVariant:
    """A way to hold a model on several ranks.

    :param stage: of ddp/sharded; 0 for replicas, by the hand-written DDP; None for torch's ``fully_shard``
    :param all_reduce: a :class:`ddp.all_reduce.sharded.ShardedAllReduce`, by its name
    :param low_precision: compute and reduce in bfloat16; replicas do not
    """

    stage: int | None
    all_reduce: str = "backend"
    low_precision: bool = False

    def wrap(self, network: GPT) -> nn.Module:
        """The network, shared by the ranks. A collective.

        :param network: may be on the meta device, but for replicas
        """
        if self.stage is None:
            return self._fully_shard(network)
        if self.stage == 0:
            from ddp.all_reduce.choice import build_all_reduce
            from ddp.by_hand.wrapper import HandwrittenDistributedDataParallel

            algorithm = build_all_reduce(self.all_reduce)
            return HandwrittenDistributedDataParallel(network, broadcast_buffers=False, all_reduce=algorithm)
        from ddp.sharded import Precision, shard

        precision = Precision(torch.bfloat16 if self.low_precision else None)
        return shard(network, self.stage, units=network.blocks, precision=precision, all_reduce=self.all_reduce)

    def _fully_shard(self, network: GPT) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        low = torch.bfloat16 if self.low_precision else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        for block in network.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(network, mp_policy=policy)
        if next(network.parameters()).is_meta:
            network.to_empty(device="cpu")
            for part in network.modules():
                if isinstance(part, nn.Linear | nn.Embedding | nn.LayerNorm):
                    part.reset_parameters()
        return network


REPLICAS, FULLY_SHARD = "replicas", "fully_shard"
STAGES: dict[str, int | None] = {REPLICAS: 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, FULLY_SHARD: None}
SHARDED_VARIANTS: Mapping[str, ShardedVariant] = {
    f"{name}{suffix}": ShardedVariant(stage, all_reduce)
    for suffix, all_reduce in (("", "backend"), (", shared memory", "shared-memory"))
    for name, stage in STAGES.items()
    if stage is not None
} | {FULLY_SHARD: ShardedVariant(None)}


def parameters_of(width: int, layers: int, length: int) -> int:
    """The number of parameters of the transformer."""
    with torch.device("meta"):
        network = GPT(VOCABULARY, width, layers, length)
    return sum(parameter.numel() for parameter in network.parameters())


@dataclass(frozen=True)
class ShardingConfig:
    """Settings of ``ddp.bench sharding``.

    :raises UsageError: for a width that heads do not divide
    """

    width: int = option(256, "of the transformer", minimum=64)
    layers: int = option(8, "its blocks, of 12 width² parameters each", minimum=1)
    sequences: int = option(4, "of each rank in a step", minimum=1)
    length: int = option(128, "tokens of a sequence", minimum=1)
    ranks: int = option(2, "processes, each with one thread", minimum=2, maximum=64)
    builds: int = option(2, "times that all variants are rebuilt", minimum=1)
    rounds: int = option(6, "measured rounds per build; in each, every variant takes one turn", minimum=2)
    turn: float = option(0.5, "seconds of a variant's turn, rounded to whole steps", above=0)
    output: Path = option(Path("runs/bench-sharding"), "folder of the JSON and the figure")

    def __post_init__(self) -> None:
        require_heads(self.width)


class ShardedVariantWorker:
    """The service of one rank: for every variant a copy of the model with an optimizer, and one batch for all.

    The learning rate is 0: constant weights make every step the same work.
    """

    def __init__(self, env: DistEnv, config: ShardingConfig, variants: Mapping[str, ShardedVariant]) -> None:
        keep_freed_memory()
        generator = torch.Generator().manual_seed(env.rank)
        size = (config.sequences, config.length)
        self._tokens, self._targets = (torch.randint(VOCABULARY, size, generator=generator) for _ in range(2))
        self._models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for name, variant in variants.items():
            torch.manual_seed(0)
            model = variant.wrap(GPT(VOCABULARY, config.width, config.layers, config.length))
            self._models[name] = model, torch.optim.AdamW(model.parameters(), lr=0.0)

    def run(self, name: str, steps: int) -> tuple[float, float]:
        """Train some steps. All ranks start together. See :func:`ddp.bench.turns.timed_steps` for what is returned."""
        model, optimizer = self._models[name]
        return timed_steps(functools.partial(self._step, model, optimizer), steps)

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(self._tokens).flatten(0, 1), self._targets.flatten()).backward()
        optimizer.step()


def main(argv: Sequence[str]) -> None:
    config = parse(ShardingConfig, "ddp.bench sharding", __doc__, argv)
    run_alone("ddp.bench sharding", config.output, lambda: measure(config), lambda taken: report(config, taken))


def measure(config: ShardingConfig) -> dict[str, list[float]]:
    """Seconds of a step of each variant, one entry per round."""
    seconds: dict[str, list[float]] = {name: [] for name in SHARDED_VARIANTS}
    with Progress(DistEnv.alone(CPU), "bench", config.builds * (config.rounds + WARMUP)) as progress:
        for build in range(config.builds):
            # The order of construction decides where tensors lie in memory, so every other build reverses it.
            order = list(SHARDED_VARIANTS)[:: -1 if build % 2 else 1]
            built = {name: SHARDED_VARIANTS[name] for name in order}
            with WorkerGroup(config.ranks, ShardedVariantWorker, config, built, threads=1) as ranks:
                for name in order:
                    VariantTurn(ranks, name, SETTLING_STEPS)()
                steps = max(1, round(config.turn / VariantTurn(ranks, REPLICAS, SETTLING_STEPS)()))
                turns: dict[str, Any] = {name: VariantTurn(ranks, name, steps) for name in order}
                taken = interleave(turns, config.rounds, WARMUP, lambda _: progress.advance(1, "sharding"))
            for name in seconds:
                seconds[name] += taken[name]
    return seconds


def report(config: ShardingConfig, seconds: dict[str, list[float]]) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    parameters = parameters_of(config.width, config.layers, config.length)
    write_results(
        config.output / "sharding.json", {"config": asdict(config), "parameters": parameters, "seconds": seconds}
    )
    title = f"{config.ranks} ranks on {usable_cores()} cores; a transformer of {parameters / 1e6:.1f} M parameters"
    panels = {
        f"as a multiple of {reference}": {
            name: paired_ratios(times, seconds[reference]) for name, times in seconds.items()
        }
        for reference in (REPLICAS, FULLY_SHARD)
    }
    plot_ratios(config.output / "sharding.png", panels, title=title, x_title="time per step")
    width = 31
    lines = [f"{title}, {config.builds} x {config.rounds} rounds, median [quartiles]"]
    lines.append(f"{'':<24}{'ms per step':>{width}}{'by replicas':>{width}}{'by ' + FULLY_SHARD:>{width}}")
    for name, times in seconds.items():
        cells = [f"{Spread.of([1e3 * value for value in times]):.1f}"]
        cells += [f"{paired_ratio(times, seconds[reference]):.3f}" for reference in (REPLICAS, FULLY_SHARD)]
        lines.append(f"  {name:<22}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join([*lines, files_line(config.output, ["sharding.json", "sharding.png"])])
