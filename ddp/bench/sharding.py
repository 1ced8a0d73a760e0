"""The stages of sharding by hand against replicas and torch's ``fully_shard``, by the time of a step (``python -m ddp.bench sharding``).

Every variant trains its own copy of one small transformer on one batch of tokens that is already in memory: forward, backward,
optimizer step. All live in the same processes and take turns. A turn begins with a barrier; its time is that of the slowest
rank, per step. malloc is told to keep freed memory, as in ``ddp.bench engines``: stages 2 and 3 free and allocate in every
step, and page faults would be most of what is measured.

ZeRO-1 and 2 send as many bytes as replicas, by a reduce-scatter and an all-gather; ZeRO-3 sends half as many again. On gloo each
sends more, since a reduce-scatter there is a whole all-reduce.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from common.benchmarking.figures import plot_rounds
from common.benchmarking.turns import Step, Times, cells, progress_of, ratios, table, write_report
from common.command_line.cli import option
from common.distributed.dist_env import DistEnv
from common.models.build import require_heads
from common.models.gpt import GPT
from ddp.bench.comparison import TurnsConfig, compare, training_step
from ddp.bench.variants import DDPVariant
from ddp.sharded import shard

VOCABULARY = 96  # printable characters
SEQUENCES = 4  # of each rank in a step


def share(network: GPT, stage: int | None, all_reduce: str = "backend") -> nn.Module:
    """Share a network among the ranks. A collective.

    :param network: may be on the meta device, but for replicas
    :param stage: of ddp/sharded; 0 for replicas, by the hand-written DDP; None for torch's ``fully_shard``
    :param all_reduce: a :class:`ddp.all_reduce.sharded.ShardedAllReduce`, by its name
    """
    if stage == 0:
        return cast(nn.Module, DDPVariant("handwritten", all_reduce=all_reduce).wrap(network))
    if stage is not None:
        return shard(network, stage, units=network.blocks, all_reduce=all_reduce)
    from torch.distributed.fsdp import fully_shard

    for block in network.blocks:
        fully_shard(block)
    fully_shard(network)
    if next(network.parameters()).is_meta:
        network.to_empty(device="cpu")
        for parameter in network.parameters():
            nn.init.zeros_(parameter)
    return network


REPLICAS, FULLY_SHARD = "replicas", "fully_shard"
STAGES: dict[str, int | None] = {REPLICAS: 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3, FULLY_SHARD: None}
# For each variant, its stage and its all-reduce.
SHARDED_VARIANTS: Mapping[str, tuple[int | None, str]] = {
    f"{name}{suffix}": (stage, all_reduce)
    for suffix, all_reduce in (("", "backend"), (", shared memory", "shared-memory"))
    for name, stage in STAGES.items()
    if stage is not None
} | {FULLY_SHARD: (None, "backend")}


@dataclass(frozen=True)
class TransformerConfig:
    """The size of the transformer.

    :raises UsageError: for a width that heads do not divide
    """

    width: int = option(256, "of the transformer", minimum=64)
    layers: int = option(8, "its blocks, of 12 width² parameters each", minimum=1)
    length: int = option(128, "tokens of a sequence", minimum=1)

    def __post_init__(self) -> None:
        require_heads(self.width)

    def build(self) -> GPT:
        """Build it on torch's default device."""
        return GPT(VOCABULARY, self.width, self.layers, self.length)

    @property
    def parameters(self) -> int:
        """Their number."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


@dataclass(frozen=True)
class Config(TransformerConfig, TurnsConfig):
    """Settings of ``ddp.bench sharding``."""

    turn: float = option(0.5, "seconds of a variant's turn, rounded to whole steps", above=0)
    output: Path = option(Path("runs/bench-sharding"), "folder of the JSON and the figure")


def sharded_step(config: Config, stage: int | None, all_reduce: str, env: DistEnv) -> Step:
    """The step of the transformer, shared in this way, on one batch that is in memory. A collective.

    The learning rate is 0: constant weights make every step the same work.
    """
    generator = torch.Generator().manual_seed(env.rank)
    size = (SEQUENCES, config.length)
    tokens, targets = (torch.randint(VOCABULARY, size, generator=generator) for _ in range(2))
    torch.manual_seed(0)
    model = share(config.build(), stage, all_reduce)
    return training_step(model, torch.optim.AdamW(model.parameters(), lr=0.0), tokens, targets)


def measure(config: Config) -> Times:
    """Measure the seconds of a step of each variant, one entry per round."""
    steps = {name: functools.partial(sharded_step, config, *variant) for name, variant in SHARDED_VARIANTS.items()}
    with progress_of(config, 1) as progress:
        return compare(config, "sharding", steps, [REPLICAS], progress).seconds


def report(config: Config, seconds: Times) -> str:
    """Write the JSON and the figure, and return the summary to print."""
    parameters = config.parameters
    title = f"{config.placement}; a transformer of {parameters / 1e6:.1f} M parameters"
    by = {f"1 = {reference}": ratios(seconds, reference) for reference in (REPLICAS, FULLY_SHARD)}
    plot_rounds(
        config.output / "sharding.png",
        by,
        title=title,
        x_title="time per step, as a multiple of the variant named above",
    )
    columns = {"ms per step": cells(seconds, ".1f", 1e3)} | {name: cells(own, ".3f") for name, own in by.items()}
    lines = [f"{title}, {config.builds} x {config.rounds} rounds, median [quartiles]", *table(columns)]
    return write_report(config, "sharding", {"parameters": parameters, "seconds": seconds}, ["sharding"], lines)
