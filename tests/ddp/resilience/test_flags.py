"""ddp/resilience/flags.py: what one rank raises in one micro-step, all know after the step; and nothing else changes by it."""

from __future__ import annotations

import contextlib
import math
import random
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from common.distributed.process_group import DistEnv, process_group
from common.training.models import build_model
from ddp.resilience.flags import NO_FLAGS, Flags, WithFlags
from ddp.strategies import REPLICATED as STRATEGIES
from ddp.strategies import Averaging
from ddp.train import wrap_network
from tests.support.launch import run_ranks

HOOKS: dict[str, Any] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
LARGEST_WORLD, MOST_MICRO_STEPS = 3, 3


class Raised(NamedTuple):
    """A flag, and where it is raised; ``not_finite`` is raised by the loss, which is ``loss`` there."""

    rank: int
    micro_step: int
    flag: str
    loss: float


class Case(NamedTuple):
    """A step: how it is computed, and all that is raised in it."""

    strategy: str
    hook: str | None
    scale: float
    grad_accumulation_steps: int
    raised: list[Raised]

    def expected(self, world_size: int) -> Flags:
        flags = {r.flag for r in self.raised if r.rank < world_size and r.micro_step < self.grad_accumulation_steps}
        return Flags(*(name in flags for name in Flags._fields))


draw = random.Random(0)
RAISED = [
    Raised(rank, micro_step, flag, draw.choice([math.nan, math.inf, -math.inf]))
    for rank in range(LARGEST_WORLD)
    for micro_step in range(MOST_MICRO_STEPS)
    for flag in Flags._fields
]
# Every flag on every rank in every micro-step, and sometimes another; each with another strategy, hook and scale.
CASES = [
    Case(
        strategy=draw.choice(STRATEGIES),
        hook=draw.choice([None, *HOOKS]),
        scale=draw.choice([1.0, 2.0**-10, 2.0**16, 2.0**24]),  # fp16 ends before 2**16
        grad_accumulation_steps=draw.randint(1, MOST_MICRO_STEPS),
        raised=[raised, *draw.choices(RAISED, k=draw.randint(0, 1))] if draw.random() < 0.8 else [],
    )
    for raised in RAISED
]


def reduced(flagged: WithFlags) -> Flags:
    """The flags after backward, as the guard reads them."""
    return Flags(*(flagged.take_reduced() != 0).tolist())


def agreed_in_each(cases: list[Case]) -> list[Flags]:
    with process_group(threads=1) as env:
        return [agreed_in(case, env) for case in cases]


def agreed_in(case: Case, env: DistEnv) -> Flags:
    """The step of ``ddp.train`` as far as flags go."""
    flagged = WithFlags(nn.Linear(3, 2), env.device)
    model: Any = flagged
    if env.world_size > 1:
        model = wrap_network(flagged, env, Averaging(case.strategy))
        if case.hook and case.strategy != "naive":
            hook = HOOKS[case.hook]
            model.register_comm_hook(
                None, lambda state, bucket: hook(state, bucket)
            )  # torch refuses bf16's by its name
    scaler = torch.amp.GradScaler("cpu", init_scale=case.scale)
    for micro_step in range(case.grad_accumulation_steps):
        mine = [r for r in case.raised if (r.rank, r.micro_step) == (env.rank, micro_step)]
        keeps = env.world_size > 1 and micro_step < case.grad_accumulation_steps - 1
        with model.no_sync() if keeps else contextlib.nullcontext():
            loss = model(torch.ones(4, 3)).square().mean()
            raised = NO_FLAGS
            for one in mine:
                if one.flag == "not_finite":
                    loss = loss * one.loss
                else:
                    raised = raised._replace(**{one.flag: True})
            scaler.scale(flagged.attach(loss, raised) / case.grad_accumulation_steps).backward()
    return reduced(flagged)


def test_what_any_rank_raises_in_any_micro_step_all_know() -> None:
    """A flag that any rank raises in any micro-step reaches all ranks with the gradients.

    Claim (ddp/resilience/README.md): flags travel with the gradients and change no bit.
    """
    for world_size in range(1, LARGEST_WORLD + 1):
        for flags in run_ranks(agreed_in_each, world_size, CASES):
            wrong = [case for case, agreed in zip(CASES, flags, strict=True) if agreed != case.expected(world_size)]
            assert wrong == [], f"on {world_size} ranks"


Step = tuple[list[float], dict[str, Any]]


def steps_with_and_without() -> list[tuple[Step, Step]]:
    """For both kinds of DDP: the losses and gradients of two micro-steps, with all flags attached, and without."""
    with process_group(threads=1) as env:
        return [(step(env, strategy, flags=True), step(env, strategy, flags=False)) for strategy in STRATEGIES]


def step(env: DistEnv, strategy: str, flags: bool) -> Step:
    torch.manual_seed(0)
    network = build_model("fashion-cnn", (1, 28, 28), 10)
    flagged = WithFlags(network, env.device) if flags else None
    model: Any = wrap_network(flagged or network, env, Averaging(strategy))
    losses = []
    for micro_step in range(2):
        torch.manual_seed(10 * env.rank + micro_step)
        images, labels = torch.randn(6, 1, 28, 28), torch.randint(10, (6,))
        with model.no_sync() if micro_step == 0 else contextlib.nullcontext():
            loss: Tensor = F.cross_entropy(model(images), labels)
            if flagged is not None:
                plain = loss.item()
                loss = flagged.attach(loss, Flags(stop=True, save=True, user_error=True))
                assert loss.item() == plain
            (loss / 2).backward()
        losses.append(loss.item())
    if flagged is not None:
        assert reduced(flagged) == Flags(stop=True, save=True, user_error=True, not_finite=False)
    gradients = {name: p.grad.numpy().copy() for name, p in network.named_parameters() if p.grad is not None}
    return losses, gradients


def test_loss_and_gradients_are_the_same_bits_as_without_the_flags() -> None:
    """Loss and gradients are the same bits as without the flags.

    Claim (ddp/resilience/README.md): flags travel with the gradients and change no bit.
    """
    for rank in run_ranks(steps_with_and_without, 2):
        for (losses, gradients), (expected_losses, expected) in rank:
            assert losses == expected_losses
            assert gradients.keys() == expected.keys() != set()
            for name, value in expected.items():
                assert np.array_equal(gradients[name], value), name


def test_the_network_knows_nothing_of_the_flags() -> None:
    network = nn.Linear(3, 2)
    names = list(network.state_dict())
    flagged = WithFlags(network, torch.device("cpu"))
    assert list(network.state_dict()) == names == [name for name, _ in network.named_parameters()]
    assert next(iter(flagged.parameters())) is flagged.flags  # DDP fills its buckets from the last parameter on


def test_flags_do_not_outlast_their_step() -> None:
    flagged = WithFlags(nn.Linear(3, 2), torch.device("cpu"))
    for raised in (Flags(save=True), NO_FLAGS, Flags(stop=True)):
        flagged.attach(flagged(torch.ones(1, 3)).sum(), raised).backward()
        assert reduced(flagged) == raised
