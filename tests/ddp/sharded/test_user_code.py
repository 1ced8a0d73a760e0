"""ddp/sharded/: what users' programs do to a model's parameters, before and after ``shard()``, against one process."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ddp.sharded import clip_grad_norm_, shard
from tests.ddp.sharded.pair import STAGES, Model, Pair, inputs, network
from tests.support.ranks import run_in_group

# Writes between passes


def written_whole(stage: int) -> None:
    """All ranks write to whole parameters: between passes (up to stage 2, where they are whole), and in ``gathered()``."""
    for compute in (None, torch.float64):
        pair = Pair(stage, compute=compute)
        pair.net.register_forward_pre_hook(lambda net, x: (x[0].to(net[0].weight.dtype),))
        pair.net.register_forward_hook(lambda *args: args[-1].float())
        pair.step(0)
        with torch.no_grad():
            with pair.model.gathered() as module:
                for one in (module, pair.plain):
                    one[0].weight.data.clamp_(-0.1, 0.1)
                    one[1][1].bias.fill_(0.5)
            pair.check()
        if stage < 3:
            pair.step(2, pair.halve)
            pair.halve()
            pair.step(3)
            pair.halve()
        pair.check()
        with pair.model.gathered() as module:
            module.load_state_dict(network().state_dict())
        pair.plain.load_state_dict(network().state_dict())
        pair.step(1)
        pair.check()


def alone(stage: int) -> None:
    """Units and layers that are called by themselves, between steps of any optimizer."""
    for optimizer in (torch.optim.Adam, functools.partial(torch.optim.Adam, fused=True)):
        pair = Pair(stage, optimizer=optimizer)
        for number in range(3):
            pair.step(number)
            hidden = torch.ones(2, 8)
            torch.testing.assert_close(pair.net[1](hidden), pair.plain[1](hidden))
            if stage < 3:
                torch.testing.assert_close(pair.net[2].weight, pair.plain[2].weight)
                torch.testing.assert_close(pair.net[2](hidden), pair.plain[2](hidden))
        pair.check()


def written_before_backward(stage: int) -> None:
    """A weight that a backward pass needs may not be written before it; one that it does not need, may."""
    pair = Pair(stage)
    loss = pair.model(inputs(0)).mean()
    pair.step(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = pair.model(inputs(0)).mean()
    with torch.no_grad():
        dict(pair.model.named_parameters())["2.bias"].add_(1.0)
    pair.optimizers[0].step(loss.backward)


# Writes in forward


class Masked(nn.Linear):
    """As PixelCNN's convolution, which sets weights to zero in forward."""

    def forward(self, x: Tensor) -> Tensor:
        if self.in_features == 8:
            self.weight.data.mul_(torch.ones_like(self.weight).tril())
        else:
            with torch.no_grad():
                self.weight.mul_(torch.ones_like(self.weight).tril())
        return super().forward(x)


def masked() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Masked(5, 8), nn.Sequential(nn.Tanh(), Masked(8, 8)), Masked(8, 3))


def written_in_forward(stage: int) -> None:
    pair = Pair(stage, masked)
    for number in range(3):
        pair.step(number)
    pair.check()
    with pytest.raises(ValueError, match=r"^0: with max_norm, each rank would change the rows of its own batch"):
        shard(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0)), stage)


# Conversions, freezing, copies


def converted(stage: int) -> None:
    conversions: list[Callable[[Any, Any], Any]] = [
        lambda net, _: net.to(torch.bfloat16),
        lambda net, _: net[1].double(),
        lambda net, model: setattr(next(iter(model.parameters())), "data", torch.ones(3)),
        lambda net, _: setattr(net[2], "weight", nn.Parameter(torch.ones(3, 8))),
    ]
    if stage < 3:
        conversions.append(lambda net, _: net.to(memory_format=torch.channels_last))
        conversions.append(lambda net, _: nn.utils.parametrizations.weight_norm(net[2]))
    for convert in conversions:
        net = nn.Sequential(*network(), nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 2, 3, padding=1))
        model: Model = shard(net, stage, units=[net[1]])
        model.to("cpu").float()  # changes nothing
        model(inputs(0)).mean().backward()
        convert(net, model)
        with pytest.raises(RuntimeError, match=r"was replaced or moved after shard\(\)"):
            model(inputs(0))


def frozen_and_unfrozen(stage: int) -> None:
    """A parameter that is frozen before stays whole and as it is; to freeze or unfreeze later is refused."""
    pair = Pair(stage, frozen_below)
    for number in range(2):
        pair.step(number)
    pair.check()
    shards = dict(pair.model.named_parameters())
    for changed in (pair.net[0].weight, pair.net[2].weight, shards["2.weight"]):
        changed.requires_grad_(not changed.requires_grad)
        with pytest.raises(RuntimeError, match=r"[02]\.weight was frozen or unfrozen after shard\(\)"):
            pair.model(inputs(0))
        changed.requires_grad_(not changed.requires_grad)
    pair.check()


def frozen_below() -> nn.Sequential:
    net = network()
    net[0].requires_grad_(False)
    return net


def later_modules(stage: int) -> None:
    pair = Pair(stage)
    pair.net[2] = nn.Sequential(pair.net[2])
    pair.step(0)
    pair.net[2] = nn.Linear(8, 3)
    with torch.no_grad():
        pair.model(inputs(1))
    with pytest.raises(RuntimeError, match=r"2\.weight is of a module that came after shard\(\)"):
        pair.model(inputs(1))


def kept_state(stage: int) -> None:
    """State that is taken in ``gathered()`` is fp32, and is still there afterwards. Passes are refused there."""
    net = network()
    expected = copy.deepcopy(net.state_dict())
    model: Model = shard(net, stage, units=[net[1]], compute=torch.bfloat16)
    whole = torch.optim.SGD(net.parameters(), lr=0.1) if stage < 3 else None
    with model.gathered() as module:
        state = module.state_dict()
        part = module[1].state_dict()
        with pytest.raises(RuntimeError, match=r"within gathered\(\) the network holds copies"):
            module(inputs(0))
    model(inputs(0).bfloat16())
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert torch.equal(part["1.bias"], expected["1.1.bias"])
    for refuse in (copy.copy, copy.deepcopy, pickle.dumps, lambda one: copy.deepcopy(one.module)):
        with pytest.raises(TypeError, match="a sharded model cannot be copied or pickled"):
            refuse(model)
    for one in (model, net, net[1]):
        with pytest.raises(RuntimeError, match="the parameters may not be whole"):
            one.state_dict()
    with pytest.raises(RuntimeError, match="does not reach the shards"):
        net.load_state_dict(state)
    model(inputs(0).bfloat16()).sum().backward()
    if whole is not None:
        for refused in (whole.step, net.zero_grad, lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0)):
            with pytest.raises(RuntimeError, match="the module's own parameters have no gradients after"):
                refused()


# Small and wrapped models


def small(stage: int) -> None:
    for size, bias in ((3, False), (3, True), (1, False)):  # 9 elements, 12, 1
        torch.manual_seed(0)
        plain = nn.Linear(size, size, bias=bias)
        model: Model = shard(copy.deepcopy(plain), stage)
        for one, ranks in ((model, None), (plain, range(4))):
            optimizer = torch.optim.Adam(one.parameters(), lr=0.1)
            for number in range(3):
                one(inputs(number, ranks)[:, :size]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        with model.gathered() as module:
            torch.testing.assert_close(module.state_dict(), plain.state_dict())


def checkpointed(stage: int) -> None:
    pair = Pair(stage, lambda: checkpoint_wrapper(network()))
    for number in range(3):
        pair.step(number)
    assert len(dict(pair.model.named_parameters())) == 6
    pair.check()


class Kinds(nn.Module):
    """Parameters of three dtypes, of which a rank may have shards of one only; the gradient is each value."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.full((9,), 400.0).half(), torch.tensor(400.0).double(), torch.full((7,), 200.0)
        self.kinds = nn.ParameterList(values)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([one.float().square().sum() / 2 for one in self.parameters()]).sum()


def clipped(stage: int) -> None:
    model: Model = shard(Kinds(), stage)
    model(torch.ones(())).backward()
    norm = (9 * 400**2 + 400**2 + 7 * 200**2) ** 0.5  # above 256, whose square is no fp16
    assert clip_grad_norm_(model.parameters(), 10.0).item() == pytest.approx(norm, rel=1e-3)
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad.float(), parameter.detach().float() * 10 / norm, rtol=1e-3, atol=0)


def other_gradients(stage: int) -> None:
    """Gradients of a penalty on the shards, and those that are replaced between passes, count; attributes stay, hooks are refused."""
    net, plain = network(), network()
    net[0].weight.decayed = True  # type: ignore[union-attr]
    model: Model = shard(net, stage)
    assert [name for name, one in model.named_parameters() if hasattr(one, "decayed")] == ["0.weight"]
    for one, ranks in ((model, None), (plain, range(2))):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in range(6):
            loss = one(inputs(number, ranks)).square().mean()
            (loss + 0.1 * sum(parameter.square().sum() for parameter in one.parameters())).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            else:
                for parameter in one.parameters():
                    parameter.grad = parameter.grad * 0.5  # type: ignore[operator]
    with model.gathered() as module:
        torch.testing.assert_close(module.state_dict(), plain.state_dict())
        with pytest.raises(RuntimeError, match="within another"), model.gathered():
            pass
    hooked = network()
    hooked[0].weight.register_hook(torch.neg)  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"0\.weight has hooks on its gradient"):
        shard(hooked, stage)


ON_TWO_RANKS = (
    other_gradients,
    written_whole,
    written_before_backward,
    alone,
    written_in_forward,
    converted,
    frozen_and_unfrozen,
    later_modules,
    kept_state,
    checkpointed,
    clipped,
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("function", "ranks"), [*((function, 2) for function in ON_TWO_RANKS), (small, 4)])
def test_what_users_do_to_a_model(function: Callable[[int], None], ranks: int, stage: int) -> None:
    """Models of any size, whose weights are written, converted, frozen or copied, train as in one process, or are refused by name.

    Claim (ddp/sharded/README.md, 5): weights that are written, converted, frozen or copied after `shard()` train as in one
    process, or are refused by name.
    """
    run_in_group(function, ranks, stage)
