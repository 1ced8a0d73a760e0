"""Random training programs: what scripts do between two steps, run with torch's DDP and with ours, compared action by action."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.all_reduce import shared_memory_hook
from ddp.by_hand import HandwrittenDistributedDataParallel, JoinableDistributedDataParallel
from tests.ddp.by_hand.wrappers import OPTIMIZERS, Case, Results, as_torch_can, first_difference, kept, wrap
from tests.support.zoo.named import CHANGING, UNUSED, batch, loss_of

ACTIONS = 20


@dataclass(frozen=True)
class Program:
    """A model, how it is wrapped, and what is done with it.

    :param case: the model, the wrapper's options and the optimizer; the rest of it is not used
    :param before: hooks of :data:`PARAMETER_HOOKS` that are registered before wrapping
    :param after: and after it
    :param nested: whether the model's first child with parameters gets a wrapper of its own
    :param actions: names of methods of :class:`Run`, each with a number that varies it
    :param uneven: how many steps each rank takes in a last block of ``join``; None for no such block
    :param by_join: with ``Join([model])`` instead of ``model.join()``
    """

    case: Case
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    nested: bool = False
    actions: tuple[tuple[str, int], ...] = ()
    uneven: tuple[int, ...] | None = None
    divide_by_initial_world_size: bool = True
    by_join: bool = False


def _clamp(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.02, 0.02)


def _replace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.75


PARAMETER_HOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp in place": lambda p: p.register_post_accumulate_grad_hook(_clamp),
    "another tensor": lambda p: p.register_post_accumulate_grad_hook(_replace),
    "half": lambda p: p.register_hook(lambda gradient: gradient * 0.5),
}


class Run:
    """A program that runs: each action yields named results.

    :param engine: torch's class or ours
    """

    def __init__(self, engine: Any, program: Program) -> None:
        self._engine, self._program = engine, program
        self._case = as_torch_can(program.case) if issubclass(engine, TorchDDP) else program.case
        self.network = self._case.network(dist.get_rank())
        self._optimizer = OPTIMIZERS[self._case.optimizer](self.network.parameters())
        self._register(program.before)
        if program.nested:
            name, child = next((n, c) for n, c in self.network.named_children() if list(c.parameters()))
            inner = dataclasses.replace(self._case, find_unused=False, static_graph=False, hook=None)
            setattr(self.network, name, wrap(engine, child, inner))
        self._model = wrap(engine, self.network, self._case)
        self._register(program.after)
        self._number = 0

    def _register(self, hooks: tuple[str, ...]) -> None:
        for hook in hooks:
            for parameter in self.network.parameters():
                if parameter.requires_grad:
                    PARAMETER_HOOKS[hook](parameter)

    def run(self) -> Iterator[tuple[str, Results]]:
        yield "after wrapping", dict(self.network.state_dict())
        for index, (action, variant) in enumerate(self._program.actions):
            for results in getattr(self, action)(variant):
                yield f"action {index}, {action}", results
        if self._program.uneven is not None:
            yield from self._uneven(self._program.uneven[dist.get_rank()])

    def _uneven(self, steps: int) -> Iterator[tuple[str, Results]]:
        """Steps of this rank in a block of ``join``, and a pass of all ranks after it."""
        divide, micro_steps = self._program.divide_by_initial_world_size, self._case.grad_accumulation_steps
        join = (
            Join([self._model], divide_by_initial_world_size=divide)
            if self._program.by_join
            else self._model.join(divide)
        )
        with join:
            for number in range(steps * micro_steps):
                last = number % micro_steps == micro_steps - 1
                with contextlib.nullcontext() if last else self._model.no_sync():
                    self._loss().backward()
                yield f"micro-step {number} in join", self._gradients_or_zeros()
                if last:
                    self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=self._case.set_to_none)
        yield "after join", self._state()
        self.network.zero_grad()  # the optimizers may differ by now
        self._loss().backward()
        yield "a pass after join", self._gradients_or_zeros()
        yield "the state after it", self._state()

    def step(self, variant: int) -> Iterator[Results]:
        """A step like any other; the gradients are dropped or zeroed."""
        self._loss().backward()
        yield from self._update(variant)

    def accumulate(self, variant: int) -> Iterator[Results]:
        """Micro-steps without synchronization before the one with it."""
        for _ in range(1 + variant % 2):
            with self._model.no_sync():
                self._loss().backward()
        yield self._gradients()
        yield from self.step(variant)

    def keep_gradients(self, variant: int) -> Iterator[Results]:
        """The averages stay, and the next action adds to them."""
        self._loss().backward()
        yield self._gradients()

    def evaluate(self, variant: int) -> Iterator[Results]:
        """A forward pass without gradients, in training or evaluation mode, before or between forward and backward."""
        loss = self._loss() if variant % 2 else None
        self.network.train(variant % 3 == 0)
        with torch.no_grad():
            self._model(self._batch(), number=self._number)
        self.network.train()
        (self._loss() if loss is None else loss).backward()
        yield from self._update(variant)

    def throw_away(self, variant: int) -> Iterator[Results]:
        """A forward pass of which nothing comes."""
        self._loss()
        yield from self.step(variant)

    def sum_of_two(self, variant: int) -> Iterator[Results]:
        """Two forward passes and one backward pass."""
        (self._loss() + self._loss()).backward()
        yield from self._update(variant)

    def inputs_gradient(self, variant: int) -> Iterator[Results]:
        """The gradient of the inputs alone; then a step."""
        inputs = self._batch().requires_grad_()
        loss = loss_of(self._model(inputs, number=self._number))
        (gradient,) = torch.autograd.grad(loss, inputs)
        yield {"inputs": gradient, **self._gradients()}
        yield from self.step(variant)

    def clip(self, variant: int) -> Iterator[Results]:
        """Gradients are changed in place between backward and the update."""
        self._loss().backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 0.1)
        yield from self._update(variant)

    def fail_in_forward(self, variant: int) -> Iterator[Results]:
        """An exception in the forward pass, then a step."""

        def fail(*_: object) -> None:
            raise ArithmeticError

        hook = self.network.register_forward_hook(fail)
        with contextlib.suppress(ArithmeticError):
            self._loss()
        hook.remove()
        yield from self.step(variant)

    def fail_in_backward(self, variant: int) -> Iterator[Results]:
        """An exception in the middle of backward, then a step. torch's DDP has to be built anew."""

        def fail(_: Tensor) -> Tensor:
            raise ArithmeticError

        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        hook = trained[variant % len(trained)].register_hook(fail)
        with contextlib.suppress(ArithmeticError):
            self._loss().backward()
        hook.remove()
        self._optimizer.zero_grad()
        if issubclass(self._engine, TorchDDP):
            self._model = wrap(self._engine, self.network, self._case, init_sync=False)
        yield from self.step(variant)

    def _batch(self) -> Tensor:
        self._number += 1
        torch.default_generator.manual_seed(1000 * self._number + dist.get_rank())
        return batch(self._number, self._case.dtype or torch.float32)

    def _loss(self) -> Tensor:
        return loss_of(self._model(self._batch(), number=self._number))

    def _update(self, variant: int) -> Iterator[Results]:
        yield self._gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=variant % 4 != 0)
        yield self._state()

    def _gradients(self) -> Results:
        return {name: parameter.grad for name, parameter in self.network.named_parameters()}

    def _gradients_or_zeros(self) -> Results:
        """Once a rank has joined, torch's DDP gives zeros for parameters that no rank uses."""
        return {name: p * 0 if p.grad is None else p.grad for name, p in self.network.named_parameters()}

    def _state(self) -> Results:
        return {**self.network.state_dict(), **dict(self.network.named_buffers())}


# Left out is what torch's DDP gets wrong or refuses: two backward passes after two forward passes, a thrown away forward pass
# before no_sync, steps after a join with another divisor, and two forward passes that use different parameters before one
# backward pass.
ALWAYS = ("step", "evaluate", "clip", "keep_gradients")
DYNAMIC = (*ALWAYS, "accumulate", "throw_away", "sum_of_two", "inputs_gradient", "fail_in_forward", "fail_in_backward")
MODELS_OF_PROGRAMS = (
    "images",
    "odd",
    "large",
    "tied",
    "frozen",
    "mixed",
    "nested",
    "scalars",
    "branches",
    "same branch",
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    model = draw(st.sampled_from(MODELS_OF_PROGRAMS))
    static_graph = draw(st.booleans()) and model not in CHANGING
    nested = draw(st.integers(0, 4)) == 4 and model in ("images", "large") and not static_graph
    case = Case(
        model,
        bucket_cap_mb=draw(st.sampled_from([0.0001, None, 0.001, 25])),
        as_view=draw(st.booleans()) and not nested,
        find_unused=(draw(st.booleans()) or model in UNUSED) and not static_graph,
        static_graph=static_graph,
        broadcast_buffers=draw(st.booleans()),
        hook=draw(st.sampled_from([None, None, None, "allreduce", "bf16"])) if not nested else None,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
    )
    # An exception must be one on all ranks, so it comes from a parameter that all of them use.
    left_out = {"fail_in_backward"} if nested or model in UNUSED else set()
    left_out |= {"sum_of_two"} if model in CHANGING else set()
    allowed = [action for action in (ALWAYS if static_graph else DYNAMIC) if action not in left_out]
    hooks = st.lists(st.sampled_from(sorted(PARAMETER_HOOKS)), max_size=1).map(tuple)
    actions = draw(
        st.lists(st.tuples(st.sampled_from(allowed), st.integers(0, 11)), min_size=ACTIONS, max_size=ACTIONS)
    )
    return Program(
        case,
        before=draw(hooks),
        after=draw(hooks),
        nested=nested,
        actions=tuple(actions),
    )


def compare(program: Program, tolerance: float = 0) -> str | None:
    """Run a program with torch's DDP and with ours; returns where the results first differ by more than the tolerance."""
    engine = HandwrittenDistributedDataParallel if program.uneven is None else JoinableDistributedDataParallel
    return compare_with(engine, program, tolerance)


def compare_in_shared_memory(program: Program) -> str | None:
    """:func:`compare` for torch's DDP with our hook. Hooks divide by the number of all ranks, also in a block of ``join``."""
    without = dataclasses.replace(program.case, hook=None)
    return compare_with(SharedMemoryDDP, dataclasses.replace(program, case=without, divide_by_initial_world_size=True))


def compare_with(engine: Any, program: Program, tolerance: float = 0) -> str | None:
    theirs, ours = (kept(Run(one, program).run()) for one in (TorchDDP, engine))
    found = first_difference(ours, theirs, tolerance)
    return found and f"{program}: {found}"


class SharedMemoryDDP(TorchDDP):
    """torch's DDP, whose gradients are averaged in shared memory."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(*shared_memory_hook())
