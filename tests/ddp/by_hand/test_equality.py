"""ddp/by_hand/wrapper.py: training goes as with torch's DDP, to the last bit, whatever the model and however it is trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ddp.all_reduce import ALL_REDUCES
from ddp.all_reduce.choice import build_all_reduce
from ddp.by_hand import HandwrittenDistributedDataParallel
from ddp.rendezvous.process_group import process_group
from tests.ddp.by_hand.programs import Program, compare, programs
from tests.ddp.by_hand.wrappers import COMPRESSING, Case
from tests.support.launch import run_ranks
from tests.support.ranks import run_in_group
from tests.support.zoo.named import LOW_PRECISION, MODELS, UNUSED

PROGRAMS = {model: programs(model, 20) for model in MODELS}
all_programs = st.tuples(*PROGRAMS.values())  # one program of each model
some_programs = st.lists(st.sampled_from(sorted(MODELS)).flatmap(PROGRAMS.__getitem__), min_size=12, max_size=12)


def tolerance(case: Case) -> float:
    if dist.get_world_size() == 2 and case.device == "cpu":  # each sum has two terms: the same bits in whatever order
        return 0
    return 3e-2 if case.model in LOW_PRECISION else 1e-9


def compared(programs: list[Program]) -> list[str]:
    with process_group(programs[0].case.device, "gloo", timeout_s=60):
        return [found for program in programs if (found := compare(program, tolerance(program.case)))]


def assert_equal_training(world_size: int, programs: Iterable[Program], fresh: bool = False) -> None:
    for found in run_ranks(compared, world_size, list(programs), timeout_s=300, fresh=fresh):
        assert found == []


def in_few_steps(program: Program) -> Program:
    # The buckets are final in the second, PowerSGD begins in the fourth.
    return replace(program, actions=program.actions[:6])


def in_high_precision(program: Program) -> Program:
    """Where sums in another order differ by little, over few steps."""
    case = program.case
    hook = None if case.hook in COMPRESSING else case.hook
    dtype = None if case.model in LOW_PRECISION else torch.float64
    return replace(program, case=replace(case, hook=hook, dtype=dtype), actions=program.actions[:3])


@settings(max_examples=2, phases=[Phase.generate])  # the first example has every setting's simplest value
@given(all_programs)
def test_two_ranks_train_to_the_same_bits_as_torch(programs: tuple[Program, ...]) -> None:
    """On two ranks, the DDP by hand trains random models and settings to the bits of torch's.

    Claim (ddp/by_hand/README.md): DDP by hand trains to torch's bits over random settings and eighteen models.
    """
    assert_equal_training(2, map(in_few_steps, programs))


@settings(max_examples=2, phases=[Phase.generate])
@given(some_programs)
def test_three_ranks_train_as_torch_does(programs: list[Program]) -> None:
    """On three ranks, the DDP by hand trains as torch's, up to rounding.

    Claim (ddp/by_hand/README.md): with more ranks, and with every all-reduce, DDP by hand trains as torch's.
    """
    assert_equal_training(3, map(in_high_precision, programs))


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_train_as_torch_does() -> None:
    """Two ranks that share a GPU over gloo train as with torch's DDP, up to rounding.

    Over gloo. Not to the last bit: a GPU's kernels need not repeat their own.

    Claim (ddp/README.md): on a GPU that two ranks share, both DDPs train, accumulate, clip, save and resume.
    """
    programs = [
        Program(replace(case, find_unused=model in UNUSED, device="cuda"), actions)
        for model in ("images", "channels last", "odd", "tied", "mixed", "branches", "checkpoint")
        for case, actions in (
            (Case(model), (("clip", 1),) * 3),
            (Case(model, bucket_cap_mb=0.0003, as_view=False), (("accumulate", 2),) * 3),
        )
    ]
    assert_equal_training(2, map(in_high_precision, programs), fresh=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@settings(max_examples=8, phases=[Phase.generate])
@given(some_programs)
def test_ranks_train_as_torch_does_in_many_cases(world_size: int, programs: list[Program]) -> None:
    """Two ranks come to the same bits in 20 steps; more ranks to the same numbers, but for rounding, in few."""
    assert_equal_training(world_size, programs if world_size == 2 else map(in_high_precision, programs))


# Several buckets are summed at once, while gradients are still computed.
BY_ALGORITHM = [
    Program(Case(model, bucket_cap_mb=0.0003, find_unused=model in UNUSED), (("accumulate", 0),) * 3)
    for model in ("images", "branches", "large")
]


def compared_by_algorithm() -> list[str]:
    failures = []
    for program in BY_ALGORITHM if dist.get_world_size() == 2 else map(in_high_precision, BY_ALGORITHM):
        for name in ALL_REDUCES:
            all_reduce = build_all_reduce(name)
            engine = partial(HandwrittenDistributedDataParallel, all_reduce=all_reduce)
            found = compare(program, tolerance(program.case), engine)
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
