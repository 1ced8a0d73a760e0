"""Steps of a sharded model: what each unit computes, gathers, reduces and frees, and the memory.

Recorded from outside: ddp/sharded/ knows nothing of it.

- Computation: hooks on the units, registered after those of the model, so that they run when a unit's parameters are there.
- Collectives: those that the model is given run in a background thread each, which records when one begins and ends.
- Waits and frees: the methods of ``FlatParameters`` are wrapped.
- Memory: counted after each of these.

The model is the transformer of common/training/gpt.py, trained with AdamW on random tokens. Each of its blocks is a unit; the
embeddings and the head are in the root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from common.distributed.process_group import DistEnv
from common.machine import keep_freed_memory
from common.reporting.run_figures import COLORS
from common.reporting.spans import COUNTERS
from common.training.gpt import GPT
from ddp.by_hand.buckets import MIB
from ddp.by_hand.outputs import tensors_in
from ddp.sharded.flat import FlatParameters
from ddp.sharded.stages import shard
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.figure import HELD, LATE, OPTIMIZER, WAIT, Look
from ddp.timeline.memory import count, state_of
from ddp.timeline.parts import Parts
from ddp.timeline.recording import RecordedCollectives, StepRecorder

VOCABULARY, LENGTH = 96, 64  # of the text: its tokens, and those of a sequence
WIDTH, LAYERS = 256, 8
ROOT = "root"  # the unit without a name
OF_A_REPLICA = 4  # times its parameters: these, their gradients, and AdamW's two moments
BLOCK_COLORS, ROOT_COLOR = (COLORS[0], COLORS[2], COLORS[3]), COLORS[4]
# The methods of FlatParameters that wait: the attribute with what they wait for, and the collective.
WAITS = {"finish_gather": ("_gathering", "gather"), "finish_reduce": ("_reducing", "reduce-scatter")}
FORWARD = 0.55  # opacity of a unit's color


class StepsOfRank(StepRecorder):
    """Trains a sharded transformer. A lap computes a unit's forward or backward pass, or waits; ``free`` is a lane."""

    def __init__(self, env: DistEnv, config: StepTimelineConfig) -> None:
        super().__init__(env)
        keep_freed_memory()  # page faults of freed and gathered parameters would be most of what is seen
        self._lap_name = ""  # what the rank computes
        self._memory: dict[str, float] = {}
        self._state = 0
        self._generator = torch.Generator().manual_seed(env.rank)
        self._size = (config.batch_size // config.ranks, LENGTH + 1)
        with torch.device("meta"):  # no rank ever holds all of it, at stage 3
            network = GPT(VOCABULARY, WIDTH, LAYERS, LENGTH)
        torch.manual_seed(0)
        self.model = shard(network, config.stage, units=network.blocks, all_reduce=config.all_reduce)
        self.model._collectives = gathers, reductions = [_Collectives(one, self) for one in self.model._collectives]
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._unit_of: dict[FlatParameters, str] = {}
        for unit in self.model.units:
            name = unit.name or ROOT
            for flat in self.model._flats_of[unit.name]:
                self._unit_of[flat] = name
                flat._gather, flat._reduce = gathers, reductions
                self._wrap(flat, name)
            self._hook(name, unit.module)

    def facts(self) -> dict[str, Any]:
        """``units``, the bytes of each unit's parameters, first the root's, which has those outside of all blocks; and
        ``replica``, the bytes that a rank would hold without sharding: parameters, gradients and the optimizer's state."""
        sizes = {unit: flat.full.nbytes for flat, unit in self._unit_of.items()}
        return {"units": sizes, "replica": OF_A_REPLICA * sum(sizes.values())}

    def next_batch(self) -> tuple[Tensor, Tensor]:
        self._memory = {}
        self.count()
        tokens = torch.randint(VOCABULARY, self._size, generator=self._generator)
        return tokens[:, :-1], tokens[:, 1:]

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self._lap_name = f"forward {ROOT}"
        loss = super().forward(batch)
        self.lap(self._lap_name)
        return loss

    def backward(self, loss: Tensor) -> None:
        self._lap_name = f"backward {ROOT}"
        super().backward(loss)
        self.lap(self._lap_name)

    def update(self) -> None:
        super().update()
        self._state = state_of(self.optimizer)
        self.count()

    def wait(self, name: str, method: Callable[[], Any]) -> Any:
        """Call what waits, in a lap of its own."""
        self.lap(self._lap_name)
        result = method()
        self.lap(name)
        return result

    def name_of(self, buffer: Tensor) -> str:
        units = (unit for flat, unit in self._unit_of.items() if buffer is flat.full or buffer is flat.gradient)
        return next(units, ROOT)

    def count(self) -> None:
        """Record the memory, if it has changed."""
        before, self._memory = self._memory, count(self.model.flats, self._state)
        if self._memory != before:
            now = self.recorder.clock.stamp()
            self.recorder.add("memory, bytes", now, now, COUNTERS, **self._memory)

    def _hook(self, unit: str, module: nn.Module) -> None:
        """Record when a unit begins and ends, in forward and in backward. Modules in no other unit are the root's."""
        module.register_forward_pre_hook(lambda *_: self._switch(f"forward {unit}"))
        if unit != ROOT:
            # Before its parameters are freed.
            module.register_forward_hook(lambda *_: self._switch(f"forward {ROOT}"), prepend=True)
            module.register_forward_hook(functools.partial(self._hook_backward, unit))

    def _hook_backward(self, unit: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hooks of a tensor run in the order of their registration: the model's own, which gather, come first."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._switch(f"backward {unit}"))
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:  # if it is the output of another unit, that one has begun already
                tensor.register_hook(lambda _: self._end_backward(unit))

    def _end_backward(self, unit: str) -> None:
        if self._lap_name == f"backward {unit}":
            self._switch(f"backward {ROOT}")

    def _switch(self, name: str) -> None:
        self.lap(self._lap_name)
        self._lap_name = name
        self.count()

    def _wrap(self, flat: FlatParameters, unit: str) -> None:
        """Wrap the methods of a unit's flat parameters that send, wait, free, and take what autograd has just made."""

        def call(name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            self.count()
            awaited, kind = WAITS.get(name, ("", ""))
            if awaited and getattr(flat, awaited) is not None:
                result = self.wait(f"wait for {kind}", method)
            elif name == "free" and flat.gathered:
                with self.recorder.span(unit, "free"):
                    result = method()
            else:
                result = method(*arguments, **named)
            self.count()
            return result

        for name in ("start_gather", "start_reduce", "free", "add_gradient", *WAITS):
            setattr(flat, name, functools.partial(call, name, getattr(flat, name)))


class _Collectives(RecordedCollectives):
    def run(self, buffer: Tensor) -> None:
        """Sum what the ranks must know of each other's gradients. The model waits for it."""
        self._steps.wait("wait for flags", lambda: self._inner.run(buffer))


def title(config: StepTimelineConfig, facts: Mapping[str, Any]) -> str:
    """Name the model and its size."""
    parameters = sum(facts["units"].values()) / 4  # of four bytes
    return (
        f"{config.strategy}, a transformer of {parameters / 1e6:.1f} M parameters in {len(facts['units'])} units, "
        f"{config.batch_size} sequences of {LENGTH} tokens, {config.placement}, "
        f"all-reduce: {config.summed_by}"
    )


def sentences(config: StepTimelineConfig, facts: Mapping[str, Any], steps: Sequence[Sequence[Parts]]) -> list[str]:
    """Sum up the memory of all steps and ranks."""
    peak, rest = (max(rank[name] for step in steps for rank in step) / MIB for name in ("peak", "rest"))
    return [
        f"memory of a rank, without activations: at most {peak:.1f} MiB, {rest:.1f} MiB between steps; a replica has "
        f"{facts['replica'] / MIB:.1f} MiB. The largest unit has {max(facts['units'].values()) / MIB:.1f} MiB of parameters"
    ]


def heading(parts: Parts) -> str:
    """Sum up a rank's step."""
    return (
        f"step {1000 * parts['step']:.0f} ms, waits for {1000 * parts['waits']:.0f} ms of it; "
        f"at most {parts['peak'] / MIB:.1f} MiB, {parts['rest'] / MIB:.1f} MiB between steps"
    )


def look(facts: Mapping[str, Any]) -> Look:
    """A unit has the same color everywhere."""
    colors: dict[str, Any] = {
        "optimizer": OPTIMIZER,
        "optimizer state": OPTIMIZER,
        "shards of parameters": "#a9b8c4",
        "shards of gradients": "#d9dde0",
        "whole parameters": COLORS[1],
        "whole gradients": "#f2b66d",
        **{f"wait for {kind}": WAIT for kind in ("gather", "reduce-scatter", "flags")},
    }
    for number, unit in enumerate(facts["units"]):  # the root is the first
        color = BLOCK_COLORS[(number - 1) % len(BLOCK_COLORS)] if number else ROOT_COLOR
        colors |= {unit: color, f"forward {unit}": (color, FORWARD), f"backward {unit}": color}
    color = BLOCK_COLORS[0]
    legend = {
        "forward of a unit": (color, FORWARD),
        "backward, or a collective, of a unit": color,
        "waits": WAIT,
        "optimizer, and its state": OPTIMIZER,
        "begun, but not yet by the slowest rank": {**LATE, "edgecolor": color},
        "parameters are whole, until freed": (color, HELD),
        **{f"memory: {kind}": colors[kind] for kind in ("whole parameters", "whole gradients")},
    }
    return Look(colors, legend, facts["replica"])
