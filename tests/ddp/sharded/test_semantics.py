"""ddp/sharded/: what users do around a sharded model, and what they do wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from common.models.gpt import GPT
from ddp.sharded import shard
from ddp.sharded.units import divide
from tests.ddp.sharded.trained import weights
from tests.support.ranks import run_in_group
from tests.support.zoo.named import Failing

STAGES = (1, 2, 3)
VOCABULARY, LENGTH, SEQUENCES = 17, 8, 4  # 64 bytes or a multiple in each parameter, with a width of 64


def network(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(VOCABULARY, 64, 2, LENGTH)


def tokens(number: int, rank: int | None = None) -> Tensor:
    """A rank's sequences in a step: [SEQUENCES, LENGTH]."""
    generator = torch.Generator().manual_seed(100 * number + (dist.get_rank() if rank is None else rank))
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())


def adamw(model: nn.Module) -> torch.optim.AdamW:
    # With the default eps, gradients that are zero but for rounding would take steps of full length.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.allclose(value, theirs[name], rtol=tolerance, atol=tolerance), name


def against_fully_shard(stage: int) -> None:
    """In bf16, with gradients summed in fp32. (In fp32 it trains to the bits of replicas: test_equality.py.)"""
    ours, theirs = network(), network()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in theirs.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(theirs, mp_policy=policy)
    model = shard(ours, stage, units=ours.blocks, compute=torch.bfloat16)
    optimizers = [adamw(one) for one in (model, theirs)]
    for number in range(5):
        losses = [loss_of(one, tokens(number)) for one in (model, theirs)]
        torch.testing.assert_close(*losses, rtol=3e-2, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: value.full_tensor() for name, value in theirs.state_dict().items()}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert_close(weights(model), expected, 2e-3)  # the values that are computed with are rounded; these are not


# GradScaler


def torn(stage: int) -> None:
    """An inf in one element of one rank's gradients, so in one shard. Then with an optimizer of each layer: some have no element on a
    rank, which cannot see the inf."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"unused": nn.Linear(64, 8), "a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})
    net.forward = lambda x: net["b"](net["a"](x))
    model = shard(net, stage, units=[])
    named = dict(model.named_parameters())
    before = {name: one.detach().clone() for name, one in named.items()}
    layers = [[one for name, one in named.items() if name.startswith(part)] for part in ("a", "b")]
    for finite, groups in ((False, [list(named.values())]), (False, layers), (True, layers)):
        optimizers = [torch.optim.SGD(group, lr=0.1) for group in groups]
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in groups]
        output = model(torch.ones(2, 64)).sum()
        if dist.get_rank() == 1:
            output = output + net.get_parameter("a.weight")[0, 0] * (1e25 if finite else torch.inf)  # its square is inf
        first, *_ = [scaler.scale(output) for scaler in scalers]
        first.backward()
        for group, optimizer, scaler in zip(groups, optimizers, scalers, strict=True):
            if finite or any(one.numel() for one in group):
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == (16.0 if finite else 4.0)
            else:
                with pytest.raises(RuntimeError, match="all shards of this optimizer are empty"):
                    scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=False)
        dist.barrier()  # no rank is in a gather
        changed = [not torch.equal(before[name], one) for name, one in named.items() if name[0] in "ab" and one.numel()]
        assert changed == [finite] * len(changed)
        assert named["unused.weight"].grad is None


@pytest.mark.parametrize("stage", STAGES)
def test_an_inf_in_one_shard_skips_the_steps_of_all_optimizers_on_all_ranks(stage: int) -> None:
    """An inf in one shard makes every rank skip the step of every optimizer.

    Claim (ddp/sharded/README.md, 5): the norm, an inf on one shard, different units and a failed pass are handled on
    all ranks alike.
    """
    run_in_group(torn, 3, stage)


# Memory and bytes


def counted(stage: int) -> dict[str, int]:
    net = network()
    parameters = sum(parameter.numel() for parameter in net.parameters())
    model: Any = shard(net, stage, units=net.blocks, all_reduce="ring")
    optimizer = adamw(model)
    for number in range(2):
        before = sum(one._p2p.sent_bytes for one in model._collectives)
        loss_of(model, tokens(number)).backward()
        full = sum(flat.whole.untyped_storage().nbytes() for flat in model.flats)
        gradients = sum(0 if flat.gradient is None else flat.gradient.nbytes for flat in model.flats)
        optimizer.step()
        optimizer.zero_grad()
    sent = sum(one._p2p.sent_bytes for one in model._collectives) - before
    padded = sum(flat.shard_numel for flat in model.flats) * dist.get_world_size()
    facts = 1 + len(list(net.parameters())) + 4  # bytes that each rank tells the others
    model.close()
    return {
        "parameters": parameters,
        "padded": padded,
        "full": full,
        "gradients": gradients,
        "sent": sent,
        "facts": facts,
        "root": sum(flat.numel for flat in model._flats_of[""]),
        "moments": sum(s["exp_avg"].nbytes for s in optimizer.state.values()),
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_rank_holds_and_sends(stage: int, ranks: int) -> None:
    """A rank holds the bytes, and sends the bytes, that the formulas say.

    Claim (ddp/sharded/README.md, 6): a rank holds and sends what the formulas say.
    """
    all_counts = run_in_group(counted, ranks, stage)
    counts = all_counts[0]
    # The sizes of parameters are multiples of 16.
    assert counts["parameters"] <= counts["padded"] < counts["parameters"] + 3 * ranks
    assert sum(one["moments"] for one in all_counts) == 4 * counts["parameters"]
    assert counts["full"] == (0 if stage == 3 else 4 * counts["padded"])
    assert counts["gradients"] == (4 * counts["padded"] if stage == 1 else 0)
    # At stage 3 parameters are gathered twice, but for the root's.
    elements = 3 * counts["padded"] - counts["root"] if stage == 3 else 2 * counts["padded"]
    expected = 4 * elements * (ranks - 1)
    facts = ranks * (ranks - 1) * counts["facts"]
    assert sum(one["sent"] for one in all_counts) == expected + facts


# Other uses


class Twice(nn.Module):
    """A module that two units share."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), shared) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def shared_module(stage: int) -> None:
    torch.manual_seed(0)
    net = Twice()
    control = copy.deepcopy(net)
    model = shard(net, stage, units=net.parts)
    assert sorted(model.units[0].owners) == ["parts.0.1.bias", "parts.0.1.weight"]
    assert torch.equal(model(torch.ones(2, 6)), control(torch.ones(2, 6)))


def unused_on_one_rank() -> None:
    """Reductions start at other moments on each rank, between other gathers: they have a group of their own."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = shard(net, 3, units=list(net))
    for _ in range(2):
        if dist.get_rank():
            net[3].forward = lambda x: x @ net[3].weight.T
        model(torch.ones(2, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def from_meta(stage: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        net = GPT(VOCABULARY, 64, 2, LENGTH)
    torch.manual_seed(5)
    model = shard(net, stage)
    loss_of(model, tokens(0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return weights(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_on_the_meta_device(stage: int) -> None:
    """A model on the meta device is sharded and initialized without a whole copy.

    Claim (ddp/sharded/README.md, 4): the meta device and tied parameters work.
    """
    first, second = run_in_group(from_meta, 2, stage)
    assert_close(first, second, 0)
    expected = network().state_dict()
    assert [(name, value.shape) for name, value in first.items()] == [
        (name, value.shape) for name, value in expected.items()
    ]
    assert first["head.weight"].std() > 0  # initial values


def tied_on_meta() -> None:
    with torch.device("meta"):
        net = network()
        net.head.weight = net.tokens.weight
    model = shard(net, 3, units=[*net.blocks, net.head])
    assert "head.weight" not in dict(model.named_parameters())
    before = weights(model)
    assert torch.equal(before["head.weight"], before["tokens.weight"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, tokens(0)).backward()
    optimizer.step()
    after = weights(model)
    assert torch.equal(after["head.weight"], after["tokens.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])


def after_an_exception(stage: int) -> None:
    """A backward pass that is abandoned leaves nothing behind that the next would trip over."""
    net, control = network(), network()
    model, expected = (shard(one, stage, units=one.blocks) for one in (net, control))
    handle = net.blocks[1].register_forward_pre_hook(lambda _, inputs: Failing.apply(inputs[0]))
    with pytest.raises(ArithmeticError):
        loss_of(model, tokens(0)).backward()
    handle.remove()
    with model.no_sync():
        loss_of(model, tokens(2)).backward()
    model.zero_grad()  # also what is on this rank alone
    for one in (model, expected):
        loss_of(one, tokens(1)).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def different_units() -> None:
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
    model = shard(experts, 3, units=experts)

    class Choice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = experts[dist.get_rank()](x)
            return result

    model.module.forward = Choice().forward
    with pytest.raises(RuntimeError, match="the ranks have run different units"):
        model(torch.ones(2, 8)).sum().backward()


# Mistakes


def mistakes() -> None:
    net = network()
    early = torch.optim.AdamW(net.parameters())
    model = shard(net, 3)
    loss_of(model, tokens(0)).backward()
    with pytest.raises(RuntimeError, match=r"the parameter 'tokens\.weight' from before shard\(\)"):
        early.step()
    with pytest.raises(ValueError, match="stage=4: there are 1"):
        shard(network(), 4)
    with pytest.raises(
        ValueError, match="'tree' has no reduce-scatter and all-gather: choose backend, ring or shared-memory"
    ):
        shard(network(), 1, all_reduce="tree")
    with pytest.raises(ValueError, match="Linear has no parameters to train"):
        shard(nn.Linear(1, 1).requires_grad_(False), 1)
    embedding = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    sharded = shard(embedding, 1)
    with pytest.raises(RuntimeError, match=r"the gradient of 0\.weight is sparse"):
        sharded(torch.tensor([1])).sum().backward()
    with torch.device("meta"):
        lonely = nn.Sequential(nn.Linear(3, 3), Lonely())
    with pytest.raises(ValueError, match=r"Lonely is on the meta device and has no reset_parameters\(\)"):
        shard(lonely, 3)


class Lonely(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


EACH_STAGE = (
    against_fully_shard,
    shared_module,
    after_an_exception,
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("function", EACH_STAGE)
def test_each_stage(function: Callable[[int], None], stage: int) -> None:
    """Each stage trains as ``fully_shard``, also around failed passes.

    Claim (ddp/sharded/README.md): each stage trains as `fully_shard`, in fp32 and bf16.
    Claim (ddp/sharded/README.md, 4): the meta device and tied parameters work.
    Claim (ddp/sharded/README.md, 5): the norm, an inf on one shard, different units and a failed pass are handled on
    all ranks alike.
    """
    run_in_group(function, 2, stage)


@pytest.mark.parametrize("function", [unused_on_one_rank, tied_on_meta, different_units, mistakes])
def test_stage_3_and_mistakes(function: Callable[[], None]) -> None:
    """Parameters that one rank leaves out or that are tied on the meta device train; misuse is refused by name.

    Claim (ddp/sharded/README.md, 4): the meta device and tied parameters work.
    Claim (ddp/sharded/README.md, 5): the norm, an inf on one shard, different units and a failed pass are handled on
    all ranks alike.
    """
    run_in_group(function, 2)


def test_units_that_do_not_fit() -> None:
    """A unit that is no submodule, or lies within another, is refused by name."""
    net = network()
    mistakes: list[tuple[list[Any], str]] = [
        ([nn.Linear(1, 1)], "a Linear is no submodule of the model"),
        ([net], "a GPT is no submodule of the model"),
        ([net.blocks[0], net.blocks[0].expand], r"blocks\.0\.expand lies within blocks\.0"),
    ]
    for units, message in mistakes:
        with pytest.raises(ValueError, match=message):
            divide(net, units)


def test_the_units_of_a_model() -> None:
    """Each parameter belongs to exactly one unit, and a tied one to the root."""
    net = network()
    assert [unit.name for unit in divide(net)] == ["", "blocks.0", "blocks.1"]
    assert [unit.name for unit in divide(net, [net.norm, net.blocks[1], net.norm])] == ["", "blocks.1", "norm"]
    names = [name for unit in divide(net) for name in unit.owners]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    net.head.weight = net.tokens.weight
    root = divide(net, [net.head])[0]
    assert len(root.owners["tokens.weight"]) == 2
