"""ddp/sharded/: what other code has attached to a model (hooks, reparametrizations, references, optimizers), against one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from ddp.sharded import shard
from tests.ddp.sharded.pair import STAGES, Model, Pair, inputs, network
from tests.support.ranks import run_in_group

SGD = functools.partial(torch.optim.SGD, momentum=0.9)

# Before forward: what builds a weight from others


def reparametrized(how: Callable[[nn.Module], object]) -> nn.Sequential:
    """The network with layers, in a unit and in the root, whose weights are computed before they run."""
    net = network()
    torch.manual_seed(1)  # spectral norm draws a vector
    how(net[0])
    how(net[1][1])  # type: ignore[index]
    return net


def scale_bias(layer: Any, _: object) -> None:
    layer.scaled = layer.weight.square().sum() * layer.bias


REPARAMETRIZED: dict[str, Callable[[nn.Module], object]] = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "weight_norm of old": nn.utils.weight_norm,
    "spectral_norm of old": nn.utils.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "a hook of one's own": lambda layer: layer.register_forward_pre_hook(scale_bias),
}


def weights_from_others(stage: int) -> None:
    for how, layers_are_units in itertools.product(REPARAMETRIZED.values(), (False, True)):
        pair = Pair(stage, functools.partial(reparametrized, how), SGD, layers_are_units)
        for number in range(3):
            pair.step(number)
        with torch.no_grad():
            outputs, expected = pair.model.eval()(inputs(99)), pair.plain.eval()(inputs(99))
        torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)


# After backward: hooks


def hooks_on_gradients(stage: int) -> None:
    """Hooks on the parameters of the sharded model see averages, and once each; a module's hooks run as ever."""
    pair = Pair(stage, optimizer=SGD)
    calls = {True: 0, False: 0}

    def count(sharded: bool, parameter: nn.Parameter) -> None:
        calls[sharded] += 1
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    def half(_: nn.Module, gradients: Any) -> Any:
        return tuple(gradient * 0.5 for gradient in gradients)

    for model, _ in pair.both:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 3)
            parameter.register_post_accumulate_grad_hook(functools.partial(count, model is pair.model))
    for net in (pair.net, pair.plain):
        net[2].register_full_backward_pre_hook(half)
        net[1].register_full_backward_hook(lambda module, into, out: None)
    for number in range(4):
        pair.step(number)
    assert calls[True] == calls[False] == 4 * len(list(pair.plain.parameters()))
    pair.check()


def hooks_and_penalties(stage: int) -> None:
    """A hook that removes itself; hooks beside a penalty on the shards, where they would run twice."""
    model: Model = shard(network(), stage)
    weight, *_ = model.parameters()
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle: Any = register(lambda _: handle.remove())  # noqa: B023
        register(lambda _: None)
    model(inputs(0)).sum().backward()
    (model(inputs(0)).sum() + model.get_submodule("module")[0].bias.sum()).backward()
    with pytest.raises(RuntimeError, match="would run twice: on that of a penalty"):
        (model(inputs(0)).sum() + weight.sum()).backward()


def optimizers_in_backward(stage: int) -> None:
    """The tutorial's: an optimizer for each parameter, which steps in a hook, so that no gradient outlives its use."""
    pair = Pair(stage)

    def step(optimizer: torch.optim.Optimizer, _: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for model, _ in pair.both:
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.05)
            parameter.register_post_accumulate_grad_hook(functools.partial(step, optimizer))
    pair.optimizers = []
    for number in range(4):
        pair.step(number)
    pair.check()


# Second references


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0].t() + self.layer.bias


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.apply_weight = functools.partial(nn.functional.linear, weight=self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_weight(x) + self.layer.bias


class Closed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        weight, self.scaled = self.layer.weight, torch.ones(3)
        self.multiply = lambda x: torch.stack([x @ row for row in weight], 1) * self.scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x) + self.layer.bias  # type: ignore[no-untyped-call]


class BufferToo(nn.Module):
    """A second reference to a buffer stays right, since buffers are not replaced."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("offset", torch.randn(3))
        self.offsets = [self.offset]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.offsets[0]  # type: ignore[no-any-return]


def second_references(stage: int) -> None:
    for kind in (Listed, Partial, Closed):
        model: Model = shard(kind(), stage)
        with pytest.raises(RuntimeError, match=r"this is the parameter 'layer\.weight' from before shard\(\)"):
            model(inputs(0))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"'layer\.weight' from before shard\(\)"):
            model(inputs(0))
    net = network()
    before = [*net.parameters()]
    shard(net, stage)
    assert [list(one.shape) for one in before] == [[8, 5], [8], [8, 8], [8], [3, 8], [3]]
    with pytest.raises(RuntimeError, match=r"'0\.weight' from before"):
        before[0].to(torch.float64)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return BufferToo()

    pair = Pair(stage, build, SGD)
    pair.step(0)
    pair.check()


# Optimizers: right on shards, or refused by name


REFUSED = {
    "Adafactor": "Adafactor needs means of a parameter's rows",
    "LBFGS": "LBFGS needs dot products",
    "Muon": "Muon only supports 2D parameters",  # torch's own words
    "SparseAdam": "SparseAdam does not support dense gradients",  # likewise, in one process too
}
TORCHS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}


WITH_EPS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")


class Lamb(torch.optim.SGD):
    """Other libraries' are known by their names."""


def every_optimizer(stage: int) -> None:
    for name, kind in {**TORCHS, "Lamb": Lamb}.items():

        def steps(name: str = name, kind: Callable[..., torch.optim.Optimizer] = kind) -> Pair:
            # With the default, a gradient that is 0 but for rounding would take a step of full length.
            options = {"eps": 1e-3} if name in WITH_EPS else {}
            pair = Pair(stage, optimizer=functools.partial(kind, **options))
            for number in range(3):
                for model, ranks in pair.both:
                    model(inputs(number, ranks)).square().mean().backward()
                for optimizer in pair.optimizers:
                    optimizer.step(*[lambda: 0.0] * isinstance(optimizer, torch.optim.LBFGS))
                    optimizer.zero_grad()
            return pair

        if name in REFUSED or name == "Lamb":
            with pytest.raises((RuntimeError, ValueError), match=REFUSED.get(name, "Lamb needs the norm")):
                steps()
        else:
            steps().check()


def lazy_and_compiled(stage: int) -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: run a forward pass"):
        shard(lazy, stage)
    lazy(torch.ones(1, 5))
    shard(lazy, stage)
    pair = Pair(stage, optimizer=SGD)
    compiled = torch.compile(pair.model, backend="eager")
    compiled(inputs(0)).square().mean().backward()
    pair.plain(inputs(0, pair.all_ranks)).square().mean().backward()
    for optimizer in pair.optimizers:
        optimizer.step()
    pair.check()


PROGRAMS = (
    weights_from_others,
    hooks_on_gradients,
    hooks_and_penalties,
    optimizers_in_backward,
    second_references,
    every_optimizer,
    lazy_and_compiled,
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_others_have_attached_to_a_model(program: Callable[[int], None], stage: int) -> None:
    """Hooks, reparametrizations, second references and optimizers are right on shards, or refused by name.

    Claim (ddp/sharded/README.md, 5): hooks, reparametrizations, second references to a parameter and all of torch's optimizers
    work on shards as in one process, or are refused by name.
    """
    run_in_group(program, 2, stage)
