"""Training programs: what scripts do in a step and between two, run with torch's DDP and with another wrapper, compared action by
action. :func:`programs` draws them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp.all_reduce import shared_memory_hook
from ddp.by_hand import HandwrittenDistributedDataParallel
from tests.ddp.by_hand.wrappers import HOOKS, OPTIMIZERS, Case, Results, first_difference, kept, wrap
from tests.support.zoo.named import CHANGING, FLOAT32, UNUSED, loss_of, tensors


@dataclass(frozen=True)
class Uneven:
    """A last block of ``join``.

    :param steps: how many each rank takes
    :param micro_steps: backward passes per optimizer step, all but the last under ``no_sync``
    :param divide: by the initial world size
    :param by_join: with ``Join([model])`` instead of ``model.join()``
    """

    steps: tuple[int, ...]
    micro_steps: int = 1
    divide: bool = True
    by_join: bool = False


@dataclass(frozen=True)
class Program:
    """A model, how it is wrapped, and what is done with it.

    :param actions: names of methods of :class:`Run`, each with a number that varies it
    :param before: hooks of :data:`PARAMETER_HOOKS` that are registered before wrapping
    :param after: and after it
    :param nested: whether the model's first child with parameters gets a wrapper of its own
    """

    case: Case
    actions: tuple[tuple[str, int], ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    nested: bool = False
    uneven: Uneven | None = None


def clamp(parameter: nn.Parameter) -> None:
    """Bound the real parts of a gradient."""
    if parameter.grad is not None:
        (torch.view_as_real(parameter.grad) if parameter.grad.is_complex() else parameter.grad).clamp_(-0.02, 0.02)


def _replace(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad * 0.75


PARAMETER_HOOKS: dict[str, Callable[[nn.Parameter], object]] = {
    "clamp in place": lambda p: p.register_post_accumulate_grad_hook(clamp),
    "another tensor": lambda p: p.register_post_accumulate_grad_hook(_replace),
    "half": lambda p: p.register_hook(lambda gradient: gradient * 0.5),
}


def whole(model: Any) -> contextlib.AbstractContextManager[nn.Module]:
    """The plain module, with whole parameters."""
    return model.gathered() if hasattr(model, "gathered") else contextlib.nullcontext(getattr(model, "module", model))


class Run:
    """A program that runs: each action yields named results.

    :param engine: makes the wrapper of a module and options
    """

    def __init__(self, engine: Callable[..., nn.Module], program: Program) -> None:
        self._engine, self._program, self._case = engine, program, program.case
        # The ranks' networks differ, so that the wrapper has to make them one.
        self.network: Any = self._case.network(dist.get_rank())
        self.networks: list[Any] = [self.network]
        self._number = 0
        self._register(self.network, program.before)
        if program.nested:
            name, child = next((n, c) for n, c in self.network.named_children() if list(c.parameters()))
            inner = dataclasses.replace(self._case, find_unused=False, static_graph=False, hook=None)
            setattr(self.network, name, wrap(engine, child, inner))
        self._model = wrap(engine, self.network, self._case)
        self._register(self._model, program.after)
        self._begin()

    def _register(self, module: nn.Module, hooks: tuple[str, ...]) -> None:
        for hook in hooks:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    PARAMETER_HOOKS[hook](parameter)

    def _begin(self) -> None:
        """Build the optimizer, and begin to average the values of what is trained."""
        self._optimizer = OPTIMIZERS[self._case.optimizer](self._model.parameters())
        self._trained = [p for p in self._optimizer.param_groups[0]["params"] if p.requires_grad]
        self._averages = [parameter.detach().clone() for parameter in self._trained]

    def run(self) -> Iterator[tuple[str, Results]]:
        yield "after wrapping", self._state()
        for index, (action, variant) in enumerate(self._program.actions):
            for results in getattr(self, action)(variant):
                yield f"action {index}, {action}", results
        if self._program.uneven is not None:
            yield from self._uneven(self._program.uneven)

    def _uneven(self, uneven: Uneven) -> Iterator[tuple[str, Results]]:
        """Steps of this rank in a block of ``join``, and a pass of all ranks after it."""
        join = (
            Join([self._model], divide_by_initial_world_size=uneven.divide)
            if uneven.by_join
            else self._model.join(uneven.divide)
        )
        with join:
            for step in range(uneven.steps[dist.get_rank()]):
                for micro_step in range(uneven.micro_steps):
                    last = micro_step == uneven.micro_steps - 1
                    with contextlib.nullcontext() if last else self._model.no_sync():
                        self._loss().backward()
                    yield f"micro-step {step}.{micro_step} in join", self._gradients_or_zeros()
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=step % 2 == 0)
        yield "after join", self._state()
        self.network.zero_grad()  # the optimizers may differ by now
        self._loss().backward()
        yield "a pass after join", self._gradients_or_zeros()
        yield "the state after it", self._state()

    def step(self, variant: int) -> Iterator[Results]:
        """A step like any other; the gradients are dropped or zeroed."""
        yield from self._backward(self._loss())
        yield from self._update(variant)

    def accumulate(self, variant: int) -> Iterator[Results]:
        """Micro-steps without synchronization before the one with it."""
        for _ in range(1 + variant % 2):
            with self._model.no_sync():
                yield from self._backward(self._loss())
        yield from self.step(variant)

    def keep_gradients(self, variant: int) -> Iterator[Results]:
        """The averages stay, and the next action adds to them."""
        yield from self._backward(self._loss())
        yield self._state()

    def evaluate(self, variant: int) -> Iterator[Results]:
        """A forward pass without gradients, in training or evaluation mode; then a step."""
        yield self._evaluate(variant)
        yield from self.step(variant)

    def evaluate_between(self, variant: int) -> Iterator[Results]:
        """The same between forward and backward."""
        loss = self._loss()
        yield self._evaluate(variant)
        yield from self._backward(loss)
        yield from self._update(variant)

    def throw_away(self, variant: int) -> Iterator[Results]:
        """A forward pass of which nothing comes."""
        self._loss()
        yield from self.step(variant)

    def sum_of_two(self, variant: int) -> Iterator[Results]:
        """Two forward passes and one backward pass."""
        yield from self._backward(self._loss() + self._loss())
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
        yield from self._backward(self._loss())
        yield {"norm": self._clip(0.1).double(), **self._gradients()}
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
        if isinstance(self._model, TorchDDP):
            self._model = wrap(self._engine, self.network, self._case, init_sync=False)
        yield from self.step(variant)

    def skip(self, variant: int) -> Iterator[Results]:
        """A backward pass without an update."""
        yield from self._backward(self._loss())
        self._optimizer.zero_grad()
        yield self._state()

    def halve(self, variant: int) -> Iterator[Results]:
        """Other gradients take the place of those that the next backward pass adds to."""
        yield from self._backward(self._loss())
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5
        yield from self.step(variant)

    @torch.no_grad()
    def swap(self, variant: int) -> Iterator[Results]:
        """Evaluate with averages of the weights."""
        for parameter, average in zip(self._trained, self._averages, strict=True):
            average.mul_(0.5).add_(parameter.to(average.dtype), alpha=0.5)
        kept_values = [parameter.clone() for parameter in self._trained]
        self._copy(self._averages, through_data=variant % 3 == 0)
        self._step_another_model()
        yield self._evaluate(variant)
        self._copy(kept_values, through_data=variant % 3 == 0)
        yield self._state()

    def _step_another_model(self) -> None:
        """On one rank alone: no wrapper takes that for a step of its own."""
        if dist.get_rank() == 0:
            torch.optim.SGD([nn.Parameter(torch.ones(1))]).step()
        dist.barrier()

    def _copy(self, values: list[Tensor], through_data: bool) -> None:
        for parameter, value in zip(self._trained, values, strict=True):
            (parameter.data if through_data else parameter).copy_(value)

    def write(self, variant: int) -> Iterator[Results]:
        """Decay by hand."""
        with torch.no_grad():
            torch._foreach_mul_(self._trained, 0.9)
        yield self._state()

    def freeze(self, variant: int) -> Iterator[Results]:
        """Freeze the last layer, or unfreeze it."""
        for network in self.networks:
            for parameter in network.head.parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        yield self._state()

    def convert(self, variant: int) -> Iterator[Results]:
        """To another dtype or layout."""
        for network in self.networks:
            network.double() if variant % 2 else network.to(memory_format=torch.channels_last)
        yield {}  # the next action refuses it, or shows it

    def load(self, variant: int) -> Iterator[Results]:
        """Weights of a checkpoint; copied, or assigned."""
        assign = variant % 2 == 1
        with whole(self._model):
            for network in self.networks:
                state = {name: value.clone() for name, value in network.state_dict().items()}
                state["head.bias"] += 0.5
                network.load_state_dict(state, assign=assign)
        if assign:
            self._begin()
        yield self._state()

    def _batch(self) -> Tensor:
        self._number += 1
        torch.manual_seed(1000 * self._number + dist.get_rank())
        return self._case.inputs(self._number, dist.get_rank())

    def _forward(self) -> Any:
        return self._model(self._batch(), number=self._number)

    def _loss(self) -> Tensor:
        return loss_of(self._forward())

    def _evaluate(self, variant: int) -> Results:
        for network in self.networks:
            network.train(variant % 3 == 0)
        with torch.no_grad() if variant % 2 else torch.inference_mode():
            outputs = self._forward()
        for network in self.networks:
            network.train()
        return {f"output {index}": output for index, output in enumerate(tensors(outputs))}

    def _clip(self, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.network.parameters(), most)

    def _backward(self, loss: Tensor) -> Iterator[Results]:
        loss.backward()
        yield {"loss": loss, **self._gradients()}

    def _update(self, variant: int) -> Iterator[Results]:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=variant % 4 != 0)
        yield self._gradients()
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
PLAIN = ("step", "accumulate", "clip", "evaluate")
STATIC = (*PLAIN, "keep_gradients", "evaluate_between")
DYNAMIC = (*STATIC, "throw_away", "sum_of_two", "inputs_gradient", "fail_in_forward", "fail_in_backward")


@st.composite
def cases(draw: st.DrawFn, model: str, hooks: Sequence[str | None] = (None, None, *HOOKS)) -> Case:
    hook = draw(st.sampled_from(hooks))
    if hook == "powersgd" and model not in FLOAT32:
        hook = None
    # PowerSGD's callbacks start collectives in gloo's threads. With several buckets, or with the collective that finds
    # unused parameters, each rank would start them in another order. torch's own DDP hangs then.
    alone = hook == "powersgd"
    static_graph = draw(st.booleans()) and model not in CHANGING and not alone
    find_unused = draw(st.booleans()) and not alone
    return Case(
        model,
        bucket_cap_mb=100 if alone else draw(st.sampled_from([0.0001, None, 0.001, 0.0003, 1, 25])),
        as_view=draw(st.booleans()),
        find_unused=find_unused or (model in UNUSED and not static_graph),
        static_graph=static_graph,
        broadcast_buffers=draw(st.booleans()),
        hook=hook,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
    )


@st.composite
def programs(draw: st.DrawFn, model: str, length: int, allowed: Sequence[str] = PLAIN) -> Program:
    """:param allowed: names of actions, from which some are taken that torch's DDP can do with the options"""
    case = draw(cases(model))
    left_out: set[str] = set()
    if case.static_graph:
        left_out |= set(DYNAMIC) - set(STATIC)
        left_out |= (
            {"accumulate"} if draw(st.booleans()) else set()
        )  # else it is no static graph with torch's; see as_torch_can
    nested = draw(st.integers(0, 4)) == 4 and model in ("images", "large") and not case.static_graph
    if nested:
        case = dataclasses.replace(case, as_view=False, hook=None)
    # An exception must be one on all ranks, so it comes from a parameter that all of them use.
    left_out |= {"fail_in_backward"} if nested or model in UNUSED or case.hook == "powersgd" else set()
    left_out |= {"sum_of_two"} if model in CHANGING else set()
    names = st.sampled_from([action for action in allowed if action not in left_out])
    actions = draw(st.lists(st.tuples(names, st.integers(0, 11)), min_size=length, max_size=length))
    hooks = st.lists(st.sampled_from(sorted(PARAMETER_HOOKS)), max_size=1).map(tuple)
    return Program(case, tuple(actions), before=draw(hooks), after=draw(hooks), nested=nested)


def as_torch_can(program: Program) -> Program:
    """The same training, for torch's DDP, which cannot do all that the hand-written one can."""
    case = program.case
    find_unused, static_graph = case.find_unused, case.static_graph
    if case.model == "inside" or any(action == "accumulate" for action, _ in program.actions):
        # A static graph must not begin with no_sync; what hides in an object of its own is not averaged in the first step.
        find_unused, static_graph = find_unused or (static_graph and case.model in UNUSED), False
    if case.model == "reentrant" or static_graph:
        find_unused = False  # fails there, and is of no use here
    hook = (
        "bf16" if case.hook == "wrapped" else case.hook
    )  # the same, but it leaves no gradients of its own dtype behind
    case = dataclasses.replace(case, find_unused=find_unused, static_graph=static_graph, hook=hook)
    return dataclasses.replace(program, case=case)


def compare(
    program: Program, tolerance: float = 0, engine: Callable[..., nn.Module] = HandwrittenDistributedDataParallel
) -> str | None:
    """Run a program with torch's DDP and with another wrapper; returns where the results first differ by more than the tolerance."""
    theirs = list(kept(Run(TorchDDP, as_torch_can(program)).run()))
    found = first_difference(kept(Run(engine, program).run()), theirs, tolerance)
    return found and f"{program}: {found}"


def compare_in_shared_memory(program: Program) -> str | None:
    """:func:`compare` for torch's DDP with our hook."""
    without = dataclasses.replace(program, case=dataclasses.replace(program.case, hook=None))
    return compare(as_torch_can(without), engine=SharedMemoryDDP)


class SharedMemoryDDP(TorchDDP):
    """torch's DDP, whose gradients are averaged in shared memory."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(*shared_memory_hook())
