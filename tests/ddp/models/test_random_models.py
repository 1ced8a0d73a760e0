"""Random models in ``ddp.train`` and in loops of the user's own: what an independent loop in one process computes, or refused."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from common.data.datasets import ImageData, ImageDataset
from common.distributed.dist_env import DistEnv
from common.training.evaluation import evaluate
from ddp.config import TrainConfig
from ddp.rendezvous.process_group import process_group
from ddp.strategies import IN_BUCKETS, STRATEGIES
from ddp.train import build_job, train_epoch
from tests.ddp.by_hand.programs import Program
from tests.ddp.by_hand.wrappers import Case, Results, first_difference
from tests.ddp.models import reference
from tests.ddp.models.loops import Loop, compare, loops, recorded
from tests.ddp.sharded.trained import weights
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


def trained(job: Job, env: DistEnv) -> Iterator[tuple[str, Any]]:
    """The losses of the epochs and of the evaluations, then the final state and the samples of this rank."""
    BUILT.append(job.model)
    data = ImageData("", draw_data(STEPS * BATCH, job.poisoned), draw_data(10), ("a", "b", "c"), 0.5, 0.25, "")
    with mock.patch("ddp.sharded.units.SMALL", 30 if job.units else 10**9):
        run = build_job(job.config, env, data)
    try:
        for epoch in range(EPOCHS):
            train_epoch(run)
            yield losses(epoch, run.totals.loss, evaluate(run.network, data, env, "fp32", run.test_loader).loss)
            run.end_epoch(0.0)
        yield "after training", weights(run.network)
        yield "samples", data.train.asked  # type: ignore[attr-defined]
    finally:
        getattr(run.network, "close", lambda: None)()


def losses(epoch: int, training: float, evaluation: float) -> tuple[str, Results]:
    return f"epoch {epoch}", {"loss": torch.tensor(training), "evaluation": torch.tensor(evaluation)}


def expected_of_job(job: Job, asked: list[list[Any]]) -> list[tuple[str, Results]]:
    """:param asked: the samples of each rank's micro-batches"""
    data, tested = draw_data(STEPS * BATCH, job.poisoned), draw_data(10)
    together = [np.concatenate(same) for same in zip(*asked, strict=True)]
    per_epoch = STEPS * job.accumulation
    assert all(sorted(np.concatenate(together[i:][:per_epoch])) == list(range(24)) for i in (0, per_epoch))
    batches = [[to_batch(data, samples) for samples in own] for own in ([together] if job.sync_batchnorm else asked)]
    replicas = reference.Replicas(lambda: Network(job.model), len(batches), OPTIMIZERS[job.optimizer])
    results = []
    for epoch in range(EPOCHS):
        part = [own[epoch * per_epoch :][:per_epoch] for own in batches]
        training = reference.train_epoch(replicas, part, job.accumulation, CLIP if job.clip else None)
        shards = [to_batch(tested, slice(rank, None, len(asked))) for rank in range(len(asked))]
        # All are evaluated, which may change what is trained.
        evaluations = [reference.evaluate(replica, shards).item() for replica in replicas.networks]
        results.append(losses(epoch, training, evaluations[0]))
    return [*results, ("after training", dict(weights(replicas.networks[0])))]


OPTIMIZERS: dict[str, reference.Optimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.01, foreach=False),
}


def attempt(case: Job | Loop, env: DistEnv) -> tuple[Any, str | None]:
    """The results of a job, or where those of a loop are wrong; and the error that ends it."""
    results: list[Any] = []
    error = None
    try:
        results.extend(trained(case, env) if isinstance(case, Job) else recorded(case))
    except Exception as refusal:  # perhaps
        error = f"{type(refusal).__name__}: {refusal}"
    gc.collect()  # so that the end of this wrapper removes no hook of optimizers while another one steps
    return results if isinstance(case, Job) else compare(case, results), error


def verdict(case: Job | Loop, everyone: list[tuple[Any, str | None]]) -> str:
    """Nothing if a case is right, "refused: ..." if it was, or what is wrong with it."""
    errors = [error for _, error in everyone]
    if any(errors) and not all(error and any(re.search(one, error) for one in REFUSALS) for error in errors):
        return f"{case}: {errors}"
    results = [results for results, _ in everyone]
    wrong = None
    if isinstance(case, Loop):
        wrong = next(filter(None, results), None)
    elif not errors[0]:
        *first, (_, asked) = results[0]
        *second, (_, asked_too) = results[1]
        wrong = first_difference(second, first, 0) or first_difference(
            first, expected_of_job(case, [asked, asked_too]), tolerance(case.model)
        )
    if wrong:
        return f"{case}: {wrong}"
    return f"refused: {errors[0]}" if errors[0] else ""


def run_cases(cases: list[Job | Loop]) -> list[str]:
    """This rank's verdicts. The ranks share the emulation."""
    verdicts = []
    with process_group(timeout_s=60) as env:
        for number, case in enumerate(cases):
            everyone: list[Any] = [None] * env.world_size
            dist.all_gather_object(everyone, attempt(case, env))
            if number % env.world_size == env.rank:
                verdicts.append(verdict(case, everyone))
    return verdicts


def assert_right(cases: list[Job | Loop]) -> None:
    for verdicts in run_ranks(run_cases, 2, cases, timeout_s=300):
        for one in verdicts:
            assert not one or one.startswith("refused: "), one


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


def only(kind: str, variant: int = 0, *others: Part, **options: Any) -> Model:
    return Model((Part(kind, variant, **options), *others))


# Looks at the model between backward and the step; and evaluation with averaged weights.
USUAL = (("keep_gradients", 1), ("evaluate", 1), ("swap", 1), ("swap", 3), ("step", 1))
# Cases that once were wrong without an error, or ended in an error that named nothing; and the words of those that are refused.
FOUND: list[tuple[Job | Loop, str]] = [
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
    *((Loop(Program(Case(only("conv"), broadcast_buffers=False), USUAL), f"zero{stage}"), "") for stage in (1, 2, 3)),
]


def test_cases_that_once_were_wrong() -> None:
    halves = run_ranks(run_cases, 2, [case for case, _ in FOUND])
    for number, (_, words) in enumerate(FOUND):
        verdict = halves[number % 2][number // 2]
        assert words in verdict if words else not verdict


def some(cases: int) -> st.SearchStrategy[list[Job | Loop]]:
    return st.lists(st.one_of(jobs(), loops()), min_size=cases, max_size=cases)


@settings(max_examples=2, phases=[Phase.generate])
@given(some(6))  # the first of Hypothesis are the smallest
def test_random_models_train_as_in_one_process_or_are_refused(cases: list[Job | Loop]) -> None:
    """Six random models and loops end with the numbers of an independent loop in one process, or are refused by name."""
    assert_right(cases)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=21, phases=[Phase.generate])
@given(some(25))
def test_500_random_models_train_as_in_one_process_or_are_refused(cases: list[Job | Loop]) -> None:
    """500 random models and loops end with the numbers of an independent loop in one process, or are refused by name.

    Claim (ddp/README.md, 7): random models and loops train as a single process does, or are refused by name.
    """
    assert_right(cases)
