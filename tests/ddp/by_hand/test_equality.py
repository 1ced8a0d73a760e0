"""ddp/by_hand/wrapper.py: training goes as with torch's DDP, to the last bit, whatever the model and however it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddp.all_reduce import ALL_REDUCES
from ddp.all_reduce.choice import build_all_reduce
from ddp.rendezvous.process_group import process_group
from tests.ddp.by_hand.wrappers import COMPRESSING, HOOKS, OPTIMIZERS, Case, compare
from tests.support.launch import run_ranks
from tests.support.ranks import run_in_group
from tests.support.zoo.named import CHANGING, FLOAT32, LOW_PRECISION, MODELS, UNUSED


@st.composite
def cases_of(draw: st.DrawFn, model: str) -> Case:
    hook = draw(st.sampled_from([None, None, *HOOKS]))
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
        grad_accumulation_steps=draw(st.integers(1, 3)),
        set_to_none=draw(st.booleans()),
        evaluate=draw(st.booleans()),
        hook=hook,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        clip=draw(st.sampled_from([None, 0.5])),
    )


all_cases = st.tuples(*map(cases_of, MODELS))  # one case of each model
some_cases = st.lists(st.sampled_from(sorted(MODELS)).flatmap(cases_of), min_size=12, max_size=12)


def tolerance(case: Case) -> float:
    if dist.get_world_size() == 2 and case.device == "cpu":  # each sum has two terms: the same bits in whatever order
        return 0
    return 3e-2 if case.model in LOW_PRECISION else 1e-9


def compared(cases: list[Case]) -> list[str]:
    with process_group(cases[0].device, "gloo", timeout_s=60):
        return [found for case in cases if (found := compare(case, tolerance(case)))]


def assert_equal_training(world_size: int, cases: Sequence[Case], fresh: bool = False) -> None:
    for found in run_ranks(compared, world_size, cases, timeout_s=300, fresh=fresh):
        assert found == []


def in_few_steps(case: Case) -> Case:
    return replace(case, steps=6)  # the buckets are final in the second, PowerSGD begins in the fourth


def in_high_precision(case: Case) -> Case:
    """Where sums in another order differ by little, over few steps."""
    hook = None if case.hook in COMPRESSING else case.hook
    return replace(case, hook=hook, steps=3, dtype=None if case.model in LOW_PRECISION else torch.float64)


@settings(max_examples=2, phases=[Phase.generate])  # the first example has every setting's simplest value
@given(all_cases)
def test_two_ranks_train_to_the_same_bits_as_torch(cases: tuple[Case, ...]) -> None:
    """On two ranks, the DDP by hand trains random models and settings to the bits of torch's.

    Claim (ddp/by_hand/README.md): DDP by hand trains to torch's bits over random settings and seventeen models.
    """
    assert_equal_training(2, list(map(in_few_steps, cases)))


@settings(max_examples=2, phases=[Phase.generate])
@given(some_cases)
def test_three_ranks_train_as_torch_does(cases: list[Case]) -> None:
    """On three ranks, the DDP by hand trains as torch's, up to rounding.

    Claim (ddp/by_hand/README.md): with more ranks, and with every all-reduce, DDP by hand trains as torch's.
    """
    assert_equal_training(3, list(map(in_high_precision, cases)))


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_train_as_torch_does() -> None:
    """Two ranks that share a GPU over gloo train as with torch's DDP, up to rounding.

    Over gloo. Not to the last bit: a GPU's kernels need not repeat their own.

    Claim (ddp/README.md): on a GPU that two ranks share, both DDPs train, accumulate, clip, save and resume.
    """
    cases = [
        replace(case, find_unused=model in UNUSED, device="cuda")
        for model in ("images", "channels last", "odd", "tied", "mixed", "branches", "checkpoint")
        for case in (Case(model, clip=0.5), Case(model, bucket_cap_mb=0.0003, grad_accumulation_steps=2, as_view=False))
    ]
    assert_equal_training(2, list(map(in_high_precision, cases)), fresh=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@settings(max_examples=8, phases=[Phase.generate])
@given(some_cases)
def test_ranks_train_as_torch_does_in_many_cases(world_size: int, cases: list[Case]) -> None:
    """Two ranks come to the same bits in 20 steps; more ranks to the same numbers, but for rounding, in few."""
    assert_equal_training(world_size, cases if world_size == 2 else list(map(in_high_precision, cases)))


# Several buckets are summed at once, while gradients are still computed.
BY_ALGORITHM = [
    Case(
        model, bucket_cap_mb=0.0003, find_unused=model in UNUSED, grad_accumulation_steps=2, set_to_none=False, steps=3
    )
    for model in ("images", "branches", "large")
]


def compared_by_algorithm() -> list[str]:
    failures = []
    for case in BY_ALGORITHM if dist.get_world_size() == 2 else map(in_high_precision, BY_ALGORITHM):
        for name in ALL_REDUCES:
            all_reduce = build_all_reduce(name)
            found = compare(case, tolerance(case), all_reduce=all_reduce)
            all_reduce.close()
            if found:
                failures.append(f"{name}: {found}")
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_all_reduce_trains_as_torch_does(world_size: int) -> None:
    """With each all-reduce, the DDP by hand trains as torch's.

    Claim (ddp/by_hand/README.md): with more ranks, and with every all-reduce, DDP by hand trains as torch's.
    """
    for found in run_in_group(compared_by_algorithm, world_size):
        assert found == []
