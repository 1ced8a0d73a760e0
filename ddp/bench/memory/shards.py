"""Slices of flat units, as in ddp/sharded/flat.py, against a shard of each parameter along its first dimension, as in ``fully_shard``.

Of n rows, a rank of N gets ``ceil(n / N)``, until there are no more: the last ranks get fewer rows, or none. So that all ranks send
equally much, each holds memory for ``ceil(n / N)`` of them. A flat unit has padding only where parameters begin, and at its end.

A gather leaves the shards in the order of the ranks. Flat slices are then in place. Shards of parameters have to be copied into the
order of the parameters: P in each of two gathers. Both copy gradients into what is reduced (P), and their own shards of
parameters and gradients (P/N each). Together 1 + 4/N times P, and 3 + 3/N, where ``fully_shard`` uses its shard of the gradients
in place. What a backend copies by itself is not counted, but for gloo's result of a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from common.distributed.process_group import DistEnv
from common.distributed.worker_group import WorkerGroup
from common.training.gpt import GPT
from common.training.models import build_model
from ddp.bench.memory.config import MemoryConfig
from ddp.bench.memory.storages import bytes_of
from ddp.bench.sharding import VOCABULARY

LAYOUTS = {"flat slices": 3, "dim-0 shards": None}  # stages, see ddp/bench/sharding.py
SIDE = 64  # pixels of an image


@dataclass(frozen=True)
class Shards:
    """One model on some ranks in one layout.

    :param units: the root is one, if it has parameters
    :param held: bytes of parameters, of each rank, with padding
    :param optimized: elements of parameters that each rank optimizes, without padding
    :param collectives: of gathers and reduce-scatters in a step of rank 0
    :param copied: bytes that rank 0 copies for them, in a step
    """

    model: str
    ranks: int
    layout: str
    parameters: int
    units: int
    held: list[int]
    optimized: list[int]
    collectives: int
    copied: int


class Counts(TorchDispatchMode):
    """In its block, on this thread: gathers and reduce-scatters, and the bytes of all copies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives = self.copied = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        result = function(*arguments, **named)
        name = str(function)
        self.collectives += name.startswith(("c10d.allgather", "c10d._allgather", "c10d._reduce_scatter"))
        if name == "fsdp.all_gather_copy_in.default":
            self.copied += result[0].nbytes  # its own shard
        elif name.startswith("fsdp.") or name in ("aten.copy_.default", "aten.mul.out"):
            written = named.get("out", result)
            self.copied += sum(tensor.nbytes for tensor in ([written] if isinstance(written, Tensor) else written))
        return result


def models(config: MemoryConfig) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """The ledger's transformer, and a ResNet-18 with its many short vectors, each with inputs."""
    tokens = torch.zeros(config.sequences, config.length, dtype=torch.int64)
    yield "transformer", GPT(VOCABULARY, config.width, config.layers, config.length), tokens
    yield "ResNet-18", build_model("resnet18", (3, SIDE, SIDE), 10), torch.rand(2, 3, SIDE, SIDE)


class ShardsWorker:
    """The service of one rank."""

    def __init__(self, env: DistEnv, config: MemoryConfig) -> None:
        self._config = config

    def run(self, layout: str) -> list[dict[str, Any]]:
        """Train each model for two steps, and count in the second. A collective."""
        return [self._count(layout, *one) for one in models(self._config)]

    def _count(self, layout: str, name: str, network: nn.Module, inputs: Tensor) -> dict[str, Any]:
        from torch.distributed.fsdp import fully_shard

        from ddp.sharded import shard
        from ddp.sharded.units import divide

        parameters = sum(parameter.numel() for parameter in network.parameters())
        root, *others = divide(network)
        units = [unit.module for unit in others]
        model: Any
        if LAYOUTS[layout] is None:
            for unit in units:
                fully_shard(unit)
            model = fully_shard(network)
        else:
            model = shard(network, 3, units=units)
        for _ in range(2):
            with Counts() as counts:
                model(inputs).sum().backward()
            model.zero_grad()
        local = [getattr(parameter, "_local_tensor", parameter) for parameter in model.parameters()]
        found = {
            "model": name,
            "parameters": parameters,
            "units": len(units) + bool(root.owners),
            "held": bytes_of(local),
            "optimized": sum(shard.numel() for shard in local),
            "collectives": counts.collectives,
            "copied": counts.copied,
        }
        if LAYOUTS[layout] is not None:
            model.close()
        return found


def measure(config: MemoryConfig) -> list[Shards]:
    """For each number of ranks, model and layout."""
    found = []
    for ranks in map(int, config.ranks):
        with WorkerGroup(ranks, ShardsWorker, config, threads=1) as group:
            for layout in LAYOUTS:
                for of_ranks in zip(*group.call("run", layout), strict=True):
                    of_all = {name: [one[name] for one in of_ranks] for name in ("held", "optimized")}
                    found.append(Shards(**of_ranks[0] | of_all, ranks=ranks, layout=layout))
    return found


def table(found: Iterable[Shards]) -> list[str]:
    """Lines to print: by how much the largest and smallest share exceeds a p-th of the parameters, then a step's copies by P."""
    columns = ("held, padding", "optimized: most", "least", "units", "collectives", "copied / P")
    lines = [f"{'':<40}" + "".join(f"{column:>17}" for column in columns)]
    for one in found:
        share = one.parameters / one.ranks
        cells = [f"{100 * (max(one.held) / 4 / share - 1):+.3f} %"]
        cells += [f"{100 * (extreme / share - 1):+.3f} %" for extreme in (max(one.optimized), min(one.optimized))]
        cells += [str(one.units), str(one.collectives), f"{one.copied / 4 / one.parameters:.2f}"]
        name = f"  {one.ranks} ranks, {one.model}, {one.layout}"
        lines.append(f"{name:<40}" + "".join(f"{cell:>17}" for cell in cells))
    return lines
