"""Random models in ``ddp.train`` and in loops of the user's own: what an independent loop in one process computes, or refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from common.data.datasets import ImageData, ImageDataset
from common.distributed.dist_env import DistEnv
from common.training.evaluation import evaluate
from ddp.by_hand import HandwrittenDistributedDataParallel, NaiveDistributedDataParallel
from ddp.config import TrainConfig
from ddp.rendezvous.process_group import process_group
from ddp.sharded import clip_grad_norm_, shard
from ddp.strategies import IN_BUCKETS, STRATEGIES
from ddp.train import build_job, train_epoch
from tests.ddp.models import reference
from tests.support.launch import run_ranks
from tests.support.zoo.random_models import CLASSES, SIDE, Model, Network, Part, models, tolerance

STEPS, BATCH, EPOCHS, CLIP = 3, 8, 2, 0.3
RATES = {"sgd": 0.05, "adam": 0.01, "adamw": 0.01}
# Each refusal names what is refused; all others are errors.
REFUSALS = (
    r"has sparse gradients, which are not averaged here: give it sparse=False",
    r"the gradient of \S+ is sparse: build its embedding with sparse=False",
    r"a gradient of \[41, 1\] is sparse: build its embedding with sparse=False",
    r"parameter \S+ was expanded, so its elements share memory: use .clone\(\)",
    r"more than one element of the written-to tensor .* Please clone\(\) the tensor",  # the optimizer's own
    r"\S+: with max_norm, ",
    r"\S+ was frozen or unfrozen during training, which --strategy .* do not see: do it when",
    r"fully_shard doesn't support scalar parameters. Change \S+ to a 1D",
    r"fsdp2: \S+ is .*: use zero3",
    r"\S+ and \S+ share memory",
    r"parameters? (\S+ )?(was|that were) frozen when",
    r"\S+ was frozen or unfrozen after shard\(\)",
    r"\d+ parameters were (converted|replaced|converted or replaced) after .*: \w",
    r"\S+ was replaced or moved after shard\(\)",
    r"\S+ was replaced, unfrozen or copied after it was wrapped: wrap the module again",
    r"backward gave no gradient to \d+ of \d+ parameters: ",
    r"load_state_dict\(\) does not reach the shards: load the weights before shard\(\)",
    r"this is the parameter '\S+' from before shard\(\)",
)


@dataclass(frozen=True)
class Job:
    """A run of ``ddp.train``.

    :param units: whether each part is a unit of what is sharded, however small it is
    :param poisoned: whether a sample has a loss that is nan, so that its step is skipped
    """

    model: Model
    strategy: str = "torch"
    optimizer: str = "sgd"
    accumulation: int = 1
    clip: bool = False
    sync_batchnorm: bool = False
    channels_last: bool = False
    units: bool = False
    poisoned: bool = False
    small_buckets: bool = False

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            model=f"{__name__}:build",
            strategy=self.strategy,
            optimizer=self.optimizer,
            lr=RATES[self.optimizer],
            weight_decay=0.01,
            schedule="constant",
            warmup_epochs=0,
            epochs=EPOCHS,
            batch_size=BATCH,
            grad_accumulation_steps=self.accumulation,
            clip_norm=CLIP if self.clip else None,
            sync_batchnorm=self.sync_batchnorm,
            channels_last=self.channels_last,
            bucket_mib=0.0001 if self.small_buckets and self.strategy in IN_BUCKETS else None,
        )


@dataclass(frozen=True)
class Program:
    """A loop of the user's own.

    :param actions: names of methods of :class:`Loop`
    :param hooked: whether a hook clamps each gradient; for a sharded wrapper, whose hooks see averages
    """

    model: Model
    wrapper: str = "handwritten"
    actions: tuple[str, ...] = ()
    hooked: bool = False


class Recorded(ImageDataset):
    """Remembers which samples were asked for."""

    def __getitems__(self, key: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), key.samples]
        return super().__getitems__(key)


def build(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Network(BUILT[-1])


BUILT: list[Model] = []


def draw_data(samples: int, poisoned: bool = False) -> ImageDataset:
    draws = np.random.default_rng(samples)
    images = draws.integers(0, 250, (samples, 1, SIDE, SIDE), np.uint8)
    if poisoned:
        images[samples // 2, 0, 0, 0] = 255
    return Recorded(images, draws.integers(0, CLASSES, samples))


def to_batch(data: ImageDataset, samples: Any) -> reference.Batch:
    return torch.from_numpy(data.images[samples]).float() / 63.75 - 2, torch.from_numpy(data.labels[samples])


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and all buffers."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {n: getattr(t, "full_tensor", t.clone)().detach().clone().contiguous() for n, t in named}


def whole(model: Any) -> contextlib.AbstractContextManager[nn.Module]:
    return model.gathered() if hasattr(model, "gathered") else contextlib.nullcontext(getattr(model, "module", model))


def trained(job: Job, env: DistEnv) -> Iterator[Any]:
    """The losses of the epochs and of the evaluations, then the samples of this rank and its final state."""
    BUILT.append(job.model)
    data = ImageData("", draw_data(STEPS * BATCH, job.poisoned), draw_data(10), ("a", "b", "c"), 0.5, 0.25, "")
    with mock.patch("ddp.sharded.units.SMALL", 30 if job.units else 10**9):
        run = build_job(job.config, env, data)
    try:
        for _ in range(EPOCHS):
            train_epoch(run)
            yield run.totals.loss
            yield evaluate(run.network, data, env, "fp32", run.test_loader).loss
            run.end_epoch(0.0)
        with whole(run.network) as module:
            yield state_of(module)
        yield data.train.asked  # type: ignore[attr-defined]
    finally:
        getattr(run.network, "close", lambda: None)()


def expected_of_job(job: Job, everyone: list[list[Any]]) -> list[Any]:
    data, tested = draw_data(STEPS * BATCH, job.poisoned), draw_data(10)
    asked = [own[-1] for own in everyone]
    together = [np.concatenate(same) for same in zip(*asked, strict=True)]
    per_epoch = STEPS * job.accumulation
    assert all(sorted(np.concatenate(together[i:][:per_epoch])) == list(range(24)) for i in (0, per_epoch))
    batches = [[to_batch(data, samples) for samples in own] for own in ([together] if job.sync_batchnorm else asked)]
    replicas = reference.Replicas(lambda: Network(job.model), len(batches), OPTIMIZERS[job.optimizer])
    results: list[Any] = []
    for epoch in range(EPOCHS):
        part = [own[epoch * per_epoch :][:per_epoch] for own in batches]
        results.append(reference.train_epoch(replicas, part, job.accumulation, CLIP if job.clip else None))
        shards = [to_batch(tested, slice(rank, None, len(everyone))) for rank in range(len(everyone))]
        losses = [
            reference.evaluate(replica, shards) for replica in replicas.networks
        ]  # which may change what is trained
        results.append(losses[0])
    return [*results, state_of(replicas.networks[0])]


def sgd(parameters: Any, decay: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, weight_decay=decay, foreach=False)


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    """Without decay, it takes sparse gradients."""
    return sgd(parameters, 0.0)


OPTIMIZERS: dict[str, reference.Optimizer] = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.01, foreach=False),
}


class Wrapped:
    """One rank's model in a wrapper, with the face of :class:`tests.ddp.models.reference.Replicas`."""

    def __init__(self, program: Program) -> None:
        sends_all = program.wrapper != "handwritten"  # rank 0's values, buffers too
        network = Network(replace(program.model, seed=program.model.seed + dist.get_rank() * sends_all))
        self.model: Any = wrap(network, program)
        self.networks, self.optimizers = [network], [plain_sgd(self.model.parameters())]
        for parameter in self.model.parameters() if program.hooked else ():
            parameter.register_post_accumulate_grad_hook(clamp)

    def add_gradients(
        self, batches: list[reference.Batch], weight: float = 1.0, synchronize: bool = True
    ) -> list[float]:
        images, labels = batches[dist.get_rank()]
        with contextlib.nullcontext() if synchronize else self.model.no_sync():
            loss = nn.functional.cross_entropy(self.model(images).float(), labels)
            (loss * weight).backward()
        return [loss.item()]

    def clip(self, most: float) -> None:
        clip = clip_grad_norm_ if hasattr(self.model, "gathered") else nn.utils.clip_grad_norm_
        clip(self.model.parameters(), most)

    def update(self, skip: bool = False) -> None:
        reference.Replicas.update(self, skip)  # type: ignore[arg-type]

    def whole(self) -> contextlib.AbstractContextManager[Any]:
        return whole(self.model)


def clamp(parameter: nn.Parameter) -> None:
    """Bound the real parts of a gradient."""
    if parameter.grad is not None:
        (torch.view_as_real(parameter.grad) if parameter.grad.is_complex() else parameter.grad).clamp_(-0.02, 0.02)


def wrap(network: nn.Module, program: Program) -> nn.Module:
    if program.wrapper == "naive":
        return NaiveDistributedDataParallel(network)
    if program.wrapper.startswith("zero"):
        return shard(network, int(program.wrapper[-1]), units=units_of(network))
    return HandwrittenDistributedDataParallel(network, broadcast_buffers=False)


def units_of(network: Any) -> list[nn.Module]:
    return [part for part in network.parts if next(part.parameters(), None) is not None]


class Emulated(reference.Replicas):
    """All ranks' loops."""

    def __init__(self, program: Program) -> None:
        super().__init__(lambda: Network(program.model), dist.get_world_size(), plain_sgd)
        self.hooked = program.hooked

    def whole(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def add_gradients(
        self, batches: list[reference.Batch], weight: float = 1.0, synchronize: bool = True
    ) -> list[float]:
        losses = super().add_gradients(batches, weight)
        if synchronize:
            self.average()
            for network in self.networks if self.hooked else ():
                for parameter in network.parameters():
                    clamp(parameter)
        return losses


class Loop:
    """The actions of a training script, with our wrapper or in the emulation."""

    def __init__(self, side: Any) -> None:
        self.side, self.number = side, 0
        self.begin()

    def begin(self) -> None:
        """Take the parameters that are trained from the optimizers, and begin to average their values."""
        of_optimizers = [optimizer.param_groups[0]["params"] for optimizer in self.side.optimizers]
        self.parameters = [[parameter for parameter in own if parameter.requires_grad] for own in of_optimizers]
        self.averages = [[parameter.detach().clone() for parameter in own] for own in self.parameters]

    def backward(self, **options: Any) -> None:
        self.number += 1
        data = draw_data(100 + self.number)
        batches = [to_batch(data, slice(4 * rank, 4 * rank + 4)) for rank in range(dist.get_world_size())]
        self.side.add_gradients(batches, **options)

    def step(self) -> None:
        self.backward()
        self.side.update()

    def accumulate(self) -> None:
        self.backward(weight=0.5, synchronize=False)
        self.backward(weight=0.5)
        self.side.update()

    def clip(self) -> None:
        self.backward()
        self.side.clip(CLIP)
        self.side.update()

    def skip(self) -> None:
        self.backward()
        self.side.update(skip=True)

    def halve(self) -> None:
        """Other gradients take the place of those that the next backward pass adds to."""
        self.backward()
        for own in self.parameters:
            for parameter in own:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5
        self.backward()
        self.side.update()

    def evaluate(self) -> list[Tensor]:
        batch = to_batch(draw_data(10), slice(None))
        return [reference.evaluate(network, [batch]) for network in self.side.networks]

    @torch.no_grad()
    def swap(self) -> list[Tensor]:
        """Evaluate with averages of the weights."""
        swapped = []
        for own, averages in zip(self.parameters, self.averages, strict=True):
            for parameter, average in zip(own, averages, strict=True):
                average.mul_(0.5).add_(parameter.to(average.dtype), alpha=0.5)
            swapped.append([parameter.clone() for parameter in own])
            torch._foreach_copy_(own, averages)
        losses = self.evaluate()
        for own, kept in zip(self.parameters, swapped, strict=True):
            torch._foreach_copy_(own, kept)
        return losses

    @torch.no_grad()
    def write(self) -> None:
        """Decay by hand."""
        for own in self.parameters:
            torch._foreach_mul_(own, 0.9)

    def freeze(self) -> None:
        for network in self.side.networks:
            for parameter in network.head.parameters():
                parameter.requires_grad_(not parameter.requires_grad)

    def double(self) -> None:
        for network in self.side.networks:
            network.double()

    def channels_last(self) -> None:
        for network in self.side.networks:
            network.to(memory_format=torch.channels_last)

    def load(self, assign: bool = False) -> None:
        with self.side.whole():
            for network in self.side.networks:
                state = {name: value.clone() for name, value in network.state_dict().items()}
                state["head.bias"] += 0.5
                network.load_state_dict(state, assign=assign)

    def assign(self) -> None:
        self.load(assign=True)
        self.side.optimizers[:] = [plain_sgd(network.parameters()) for network in self.side.networks]
        self.begin()


ACTIONS = (
    "step",
    "accumulate",
    "clip",
    "skip",
    "halve",
    "evaluate",
    "swap",
    "write",
    "freeze",
    "double",
    "channels_last",
    "load",
    "assign",
)


def looped(program: Program) -> Iterator[Any]:
    """The results of evaluations, and the state after each action."""
    side = Wrapped(program)
    try:
        loop = Loop(side)
        for action in program.actions:
            result = getattr(loop, action)()
            with side.whole() as module:
                yield result, state_of(module)
        yield None
    finally:
        getattr(side.model, "close", lambda: None)()


def expected_of_program(program: Program, everyone: list[list[Any]]) -> list[list[Any]]:
    side = Emulated(program)
    loop = Loop(side)
    results: list[list[Any]] = [[] for _ in everyone]
    for action in program.actions:
        values = getattr(loop, action)() or [None] * len(everyone)
        for own, value, network in zip(results, values, side.networks, strict=True):
            own.append(([value] if value is not None else None, state_of(network)))
    return results


def attempt(case: Job | Program, env: DistEnv) -> tuple[list[Any], str | None]:
    """The results of a case, and the error that ends it."""
    results: list[Any] = []
    try:
        results.extend(trained(case, env) if isinstance(case, Job) else looped(case))
    except Exception as error:  # which may be a refusal
        return results, f"{type(error).__name__}: {error}"
    return results, None


def difference(actual: Any, expected: Any, most: float) -> str:
    """The name and size of the first difference, or nothing."""
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return f"names {sorted(actual.keys() ^ expected.keys())}"
        return next((f"{n}: {found}" for n in expected if (found := difference(actual[n], expected[n], most))), "")
    if isinstance(expected, (list, tuple)):
        pairs = enumerate(zip(actual, expected, strict=False))
        return next((f"{i}: {found}" for i, (a, e) in pairs if (found := difference(a, e, most))), "")
    if expected is None:
        return "" if actual is None else "None"
    a, e = (torch.as_tensor(one).to(torch.complex128) for one in (actual, expected))
    if a.shape != e.shape:
        return f"{list(a.shape)} instead of {list(e.shape)}"
    if not e.numel():
        return ""
    error = ((a - e).abs().max() / e.abs().max().clamp(min=1)).item()
    return "" if error <= most else f"differs by {error:.1e}"


def verdict(case: Job | Program, everyone: list[tuple[list[Any], str | None]]) -> str:
    """Nothing if a case is right, "refused: ..." if it was, or what is wrong with it."""
    errors = [error for _, error in everyone]
    if any(errors) and not all(error and any(re.search(one, error) for one in REFUSALS) for error in errors):
        return f"{case}: {errors}"
    results = [results for results, _ in everyone]
    if isinstance(case, Program):
        expected = expected_of_program(case, results)
    elif errors[0]:
        expected = []
    else:
        expected = [expected_of_job(case, results)] * len(results)
        if apart := difference(results[1][:-1], results[0][:-1], 0.0):
            return f"{case}: the ranks differ: {apart}"
    if wrong := difference(results, expected, tolerance(case.model)):
        return f"{case}: {wrong}"
    return f"refused: {errors[0]}" if errors[0] else ""


def run_cases(cases: list[Job | Program]) -> list[str]:
    """This rank's verdicts. The ranks share the emulation."""
    verdicts = []
    with process_group(timeout_s=60) as env:
        for number, case in enumerate(cases):
            everyone: list[Any] = [None] * env.world_size
            dist.all_gather_object(everyone, attempt(case, env))
            if number % env.world_size == env.rank:
                verdicts.append(verdict(case, everyone))
    return verdicts


def assert_right(cases: list[Job | Program]) -> None:
    for verdicts in run_ranks(run_cases, 2, cases, timeout_s=300):
        assert [one for one in verdicts if one and not one.startswith("refused: ")] == []


BY_BATCH = {"instancenorm", "statistics", "fourier"}  # parts with statistics that --sync-batchnorm leaves to each rank
ROUNDED = {"scale", "fourier"}  # parts with some gradients that are 0 but for rounding errors, which Adam magnifies


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    model = draw(models())
    kinds = {part.kind for part in model.parts}
    exact = model.dtype == torch.float64 and not kinds & ROUNDED
    return Job(
        model,
        draw(st.sampled_from(STRATEGIES)),
        draw(st.sampled_from(sorted(RATES) if exact else ["sgd"])),
        draw(st.sampled_from([1, 2])),
        draw(st.booleans()),
        draw(st.booleans()) and not kinds & BY_BATCH,
        *(draw(st.booleans()) for _ in range(4)),
    )


@st.composite
def programs(draw: st.DrawFn) -> Program:
    wrapper = draw(st.sampled_from(["naive", "handwritten", "zero1", "zero2", "zero3"]))
    actions = draw(st.lists(st.sampled_from((*ACTIONS, *ACTIONS[:8])), min_size=3, max_size=8))
    hooked = wrapper.startswith("zero") and draw(st.booleans())
    return Program(draw(models()), wrapper, ("step", *actions, "step"), hooked)


def only(kind: str, variant: int = 0, *others: Part, **options: Any) -> Model:
    return Model((Part(kind, variant, **options), *others))


# Cases that once were wrong without an error, or ended in an error that named nothing; and the words of those that are refused.
FOUND: list[tuple[Job | Program, str]] = [
    (Job(only("statistics")), ""),  # buffers of integers
    (Job(only("fourier")), ""),  # complex buffers
    (Job(only("thawing", 0)), "layer.weight was frozen or unfrozen during"),
    (Job(only("thawing", 1)), "layer.weight was frozen or unfrozen during"),
    (Job(only("thawing", 0), "fsdp2"), "layer.weight was frozen or unfrozen during"),
    (Job(only("lookup", 5)), "rows: with max_norm"),
    (Job(only("aliased", 0, Part("conv")), channels_last=True), "share memory"),
    (Job(only("aliased", 0, Part("conv", layout="gaps"))), "share memory"),
    (Job(only("aliased", 0, Part("conv")), "zero1"), "share memory"),
    (Job(only("scale", 2), "fsdp2"), "none is torch.float32 of [0, 3]"),
    (Job(only("fourier"), "fsdp2"), "filter is torch.complex64"),
    (Job(only("conv", layout="transposed"), "fsdp2"), ""),
    (Job(only("fourier"), "zero2", clip=True), ""),
]


def test_cases_that_once_were_wrong() -> None:
    halves = run_ranks(run_cases, 2, [case for case, _ in FOUND])
    for number, (_, words) in enumerate(FOUND):
        verdict = halves[number % 2][number // 2]
        assert words in verdict if words else not verdict


def some(cases: int) -> st.SearchStrategy[list[Job | Program]]:
    return st.lists(st.one_of(jobs(), programs()), min_size=cases, max_size=cases)


@settings(max_examples=2, phases=[Phase.generate])
@given(some(6))  # the first of Hypothesis are the smallest
def test_random_models_train_as_in_one_process_or_are_refused(cases: list[Job | Program]) -> None:
    """Six random models and loops end with the numbers of an independent loop in one process, or are refused by name."""
    assert_right(cases)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=21, phases=[Phase.generate])
@given(some(25))
def test_500_random_models_train_as_in_one_process_or_are_refused(cases: list[Job | Program]) -> None:
    """500 random models and loops end with the numbers of an independent loop in one process, or are refused by name.

    Claim (ddp/README.md, 7): random models and loops train as a single process does, or are refused by name.
    """
    assert_right(cases)
