"""The moments of a step of a sharded model on a rank, recorded from outside: ddp/sharded/ knows nothing of it.

- Computation: hooks on the units, registered after those of the model, so that they run when a unit's parameters are there.
- Collectives: those that the model is given run in a background thread each, which notes when one begins and ends.
- Waits and frees: the methods of ``FlatParameters`` are wrapped.
- Memory: counted after each of these.

Moments are seconds of ``time.perf_counter``, as in ddp/timeline/recording.py.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.distributed.process_group import DistEnv
from common.training.gpt import GPT
from ddp.all_reduce.backend import Backend, another_group
from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.bench.turns import keep_freed_memory
from ddp.by_hand.outputs import tensors_in
from ddp.sharded.flat import FlatParameters
from ddp.sharded.stages import STAGES
from ddp.timeline.config import StepTimelineConfig
from ddp.timeline.sharded.memory import Memory, count, state_of

VOCABULARY = 96
ROOT = "root"  # what a picture calls the unit without a name


@dataclass(frozen=True)
class Span:
    """Something that a rank did.

    :param kind: ``"forward"``, ``"backward"`` or ``"optimizer"``, which follow each other; ``"gather"`` or ``"reduce-scatter"``, in
        the background; ``"wait for gather"``, ``"wait for reduce-scatter"`` or ``"wait for flags"`` (what the ranks must know of
        each other's gradients), within forward or backward; or ``"free"``, of whole parameters
    :param unit: its name
    :param start: seconds
    :param end: seconds
    """

    kind: str
    unit: str
    start: float
    end: float


@dataclass(frozen=True)
class ShardedStep:
    """A step on one rank.

    :param began: the step begins
    :param forwarded: the loss is computed
    :param returned: backward returns: this rank has its slice of all gradients
    :param ended: the optimizer has changed this rank's slice
    :param spans: in the order of their ends
    :param memory: what there is at ``began``, and each change
    """

    began: float
    forwarded: float
    returned: float
    ended: float
    spans: list[Span]
    memory: list[Memory]

    def since(self, origin: float) -> ShardedStep:
        """The same moments, counted from ``origin``."""
        return ShardedStep(
            self.began - origin,
            self.forwarded - origin,
            self.returned - origin,
            self.ended - origin,
            [Span(span.kind, span.unit, span.start - origin, span.end - origin) for span in self.spans],
            [replace(memory, moment=memory.moment - origin) for memory in self.memory],
        )

    def of(self, *kinds: str) -> list[Span]:
        """The spans of some kinds, in order."""
        return [span for span in self.spans if span.kind in kinds]


class RecordingCollectives(ShardedAllReduce):
    """Runs another's collectives one after the other in a background thread, and tells when each began and ended.

    :param record: called with the kind of collective, its tensor, the start and the end
    """

    def __init__(self, inner: ShardedAllReduce, record: Callable[[str, Tensor, float, float], None]) -> None:
        super().__init__()
        self._inner, self._record = inner, record

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.allocate(numel, dtype, device)

    def run(self, buffer: Tensor) -> None:
        self._timed("wait for flags", self._inner.run, buffer)  # not in the background: the model waits for it

    def all_gather(self, buffer: Tensor) -> None:
        self._timed("gather", self._inner.all_gather, buffer)

    def reduce_scatter(self, buffer: Tensor) -> None:
        self._timed("reduce-scatter", self._inner.reduce_scatter, buffer)

    def close(self) -> None:
        super().close()
        self._inner.close()

    def _timed(self, kind: str, collective: Callable[[Tensor], None], buffer: Tensor) -> None:
        start = time.perf_counter()
        collective(buffer)
        self._record(kind, buffer, start, time.perf_counter())


def _collectives(name: str) -> ShardedAllReduce:
    if name == "backend":  # gathers and reductions run at the same time, each kind in an order of its own
        assert dist.group.WORLD is not None
        return Backend(another_group(dist.group.WORLD))
    algorithm = build_all_reduce(name)
    assert isinstance(algorithm, ShardedAllReduce)
    return algorithm


class ShardedRecorder:
    """The service of one rank: it trains a sharded transformer on random tokens and records the moments of each step."""

    def __init__(self, env: DistEnv, config: StepTimelineConfig) -> None:
        keep_freed_memory()  # page faults of freed and gathered parameters would be most of what is seen
        self._spans: list[Span] = []
        self._memory: list[Memory] = []
        self._computing: tuple[str, str, float] | None = (
            None  # the kind and the unit of the span that is not over, its start
        )
        self._started: set[tuple[FlatParameters, str]] = set()  # collectives that are not waited for yet
        self._state = 0
        self._generator = torch.Generator().manual_seed(env.rank)
        self._size = (config.sequences, config.length + 1)
        with torch.device("meta"):  # no rank ever holds all of it, at stage 3
            network = GPT(VOCABULARY, config.width, config.layers, config.length)
        collectives = [RecordingCollectives(_collectives(config.all_reduce), self._transferred) for _ in range(2)]
        torch.manual_seed(0)
        self.model = STAGES[config.stage](network, network.blocks, collectives=(collectives[0], collectives[1]))
        self._optimizer = torch.optim.AdamW(self.model.parameters())
        self._units = {unit.name or ROOT: unit.module for unit in self.model.units}
        unit_of_parameter = {name: unit.name or ROOT for unit in self.model.units for name in unit.owners}
        self._unit_of = {flat: unit_of_parameter[next(iter(flat.owners))] for flat in self.model.flats}
        for flat, unit in self._unit_of.items():
            self._wrap(flat, unit)
        for unit, module in self._units.items():
            self._hook(unit, module)

    def units(self) -> dict[str, int]:
        """The bytes of each unit's parameters. The root, which has those outside of all blocks, is the first."""
        sizes = dict.fromkeys(self._units, 0)
        for flat, unit in self._unit_of.items():
            sizes[unit] += flat.full.nbytes
        return sizes

    def run(self, steps: int) -> list[ShardedStep]:
        """Take some steps. All ranks start together."""
        dist.barrier()
        return [self._step() for _ in range(steps)]

    def _step(self) -> ShardedStep:
        tokens = torch.randint(VOCABULARY, self._size, generator=self._generator)
        self._spans, self._memory = [], []
        began = time.perf_counter()
        self._count()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        forwarded = self._switch("backward", ROOT)
        loss.backward()
        returned = self._switch("optimizer", ROOT)
        self._optimizer.step()
        self._state = state_of(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        ended = self._switch(None, ROOT)
        self._count()
        return ShardedStep(began, forwarded, returned, ended, self._spans, self._memory)

    # Computation

    def _hook(self, unit: str, module: nn.Module) -> None:
        """Note when a unit begins and ends, in forward and in backward. What is not in another unit is the root's."""
        module.register_forward_pre_hook(lambda *_: self._begin("forward", unit))
        if unit == ROOT:
            return
        module.register_forward_hook(
            lambda *_: self._end("forward", unit), prepend=True
        )  # before its parameters are freed
        module.register_forward_hook(functools.partial(self._hook_backward, unit))

    def _hook_backward(self, unit: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """Hooks of a tensor run in the order of their registration: the model's own, which gather, come first."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._begin("backward", unit))
        for tensor in tensors_in(inputs):
            if tensor.requires_grad:  # if it is the output of another unit, that one has begun already
                tensor.register_hook(lambda _: self._end("backward", unit))

    def _begin(self, kind: str, unit: str) -> None:
        self._switch(kind, unit)
        self._count()

    def _end(self, kind: str, unit: str) -> None:
        if self._computing is not None and self._computing[:2] == (kind, unit):
            self._begin(kind, ROOT)

    def _switch(self, kind: str | None, unit: str) -> float:
        """End the span that is computed, and begin another, unless ``kind`` is None. Returns the moment."""
        now = time.perf_counter()
        if self._computing is not None:
            self._spans.append(Span(*self._computing, now))
        self._computing = None if kind is None else (kind, unit, now)
        return now

    # Collectives, waits and frees

    def _transferred(self, kind: str, buffer: Tensor, start: float, end: float) -> None:
        """A collective is over. Called in a thread of its own."""
        of = [unit for flat, unit in self._unit_of.items() if buffer is flat.full or buffer is flat.gradient]
        self._spans.append(Span(kind, of[0] if of else ROOT, start, end))

    def _wrap(self, flat: FlatParameters, unit: str) -> None:
        """Wrap the methods of a unit's flat parameters that send, wait and free."""

        def wrap(name: str, around: Callable[..., Any]) -> None:
            setattr(flat, name, functools.partial(around, getattr(flat, name)))

        def start(kind: str, method: Callable[[], None]) -> None:
            method()
            self._started.add((flat, kind))
            self._count()

        def finish(kind: str, method: Callable[[], None]) -> None:
            began = time.perf_counter()
            method()
            if (flat, kind) in self._started:
                self._started.discard((flat, kind))
                self._spans.append(Span(f"wait for {kind}", unit, began, time.perf_counter()))
                self._count()

        def free(method: Callable[[], None]) -> None:
            was_whole, began = flat.gathered, time.perf_counter()
            method()
            if was_whole:
                self._spans.append(Span("free", unit, began, time.perf_counter()))
                self._count()

        def add_gradient(method: Callable[..., bool], index: int, average: bool) -> bool:
            self._count()  # autograd has just made it
            complete = method(index, average)
            self._count()
            return complete

        for kind, verb in (("gather", "gather"), ("reduce-scatter", "reduce")):
            wrap(f"start_{verb}", functools.partial(start, kind))
            wrap(f"finish_{verb}", functools.partial(finish, kind))
        wrap("free", free)
        wrap("add_gradient", add_gradient)

    def _count(self) -> None:
        """Note the memory, if it has changed."""
        memory = count(self._unit_of, self._state, time.perf_counter())
        if not self._memory or replace(self._memory[-1], moment=memory.moment) != memory:
            self._memory.append(memory)
