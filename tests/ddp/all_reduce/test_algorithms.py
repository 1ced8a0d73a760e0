"""ddp/all_reduce/: all algorithms sum as torch's own all-reduce does, to the same bits on all ranks, and name a lost rank."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.distributed.process_group import process_group
from common.resilience.failure_detector import RankLost
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.choice import watched_backend
from ddp.all_reduce.halving_doubling import HalvingDoubling
from ddp.all_reduce.naive import Naive
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.ring import Ring
from ddp.all_reduce.tree import Tree
from tests.support.launch import run_ranks, run_with_victim

Build = Callable[[P2P], AllReduce]
BY_HAND: list[Build] = [Naive, Ring, HalvingDoubling, Tree]
ALGORITHMS: list[Build] = [watched_backend, *BY_HAND]
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = [torch.uint8, torch.int32, torch.int64, *TOLERANCES]

Case = tuple[int, torch.dtype]  # numel, dtype
LARGE: list[Case] = [(300_007, torch.float32), (200_003, torch.bfloat16)]
cases = st.tuples(st.integers(0, 20) | st.integers(0, 5000), st.sampled_from(DTYPES))


def lists_of_cases(number: int) -> st.SearchStrategy[list[Case]]:
    """So many cases, all different: the simplest example alone would be one case, repeated."""
    return st.lists(cases, min_size=number, max_size=number, unique=True)


def drawn(case: Case, seed: int) -> Tensor:
    """This rank's tensor of a case."""
    numel, dtype = case
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 256, (numel,), generator=generator).to(dtype)


def assert_is_sum(ours: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES.get(ours.dtype, 0)
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def sum_among_the_first(size: int, examples: list[Case]) -> list[int]:
    """A digest of every algorithm's result in every case; half of the sums are started all at once."""
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return []
    assert isinstance(group, dist.ProcessGroup)
    tensors = [drawn(case, seed) for seed, case in enumerate(examples)]
    expected = [tensor.clone() for tensor in tensors]
    for tensor in expected:
        dist.all_reduce(tensor, group=group)
    p2p = P2P(group)
    digests = []
    for build in BY_HAND:
        algorithm = build(p2p)
        results = [tensor.clone() for tensor in tensors]
        half = len(results) // 2
        for tensor in results[:half]:
            algorithm.run(tensor)
        for pending in [algorithm.start(tensor) for tensor in results[half:]]:
            pending.wait()
        algorithm.close()
        for ours, theirs in zip(results, expected, strict=True):
            assert_is_sum(ours, theirs)
            digests.append(zlib.crc32(ours.view(torch.uint8).numpy().tobytes()))
    return digests


def summed(sizes: Sequence[int], examples: list[Case]) -> list[list[int]]:
    with process_group(timeout_s=250):
        return [sum_among_the_first(size, examples) for size in sizes]


def assert_same_sums(sizes: Sequence[int], examples: list[Case]) -> None:
    results = run_ranks(summed, max(sizes), sizes, [*examples, *LARGE], timeout_s=280)
    for size, first, *others in zip(sizes, *results, strict=True):
        assert others[: size - 1] == [first] * (size - 1)


@settings(max_examples=1, phases=[Phase.generate])  # to shrink would start hundreds of jobs
@given(examples=lists_of_cases(6))
def test_algorithms_sum_as_torch_does_to_the_same_bits_on_all_ranks(examples: list[Case]) -> None:
    assert_same_sums([1, 2, 3, 4, 6], examples)


@pytest.mark.slow
@settings(max_examples=5, phases=[Phase.generate])
@given(examples=lists_of_cases(20))
def test_algorithms_sum_as_torch_does_in_many_cases(examples: list[Case]) -> None:
    assert_same_sums(range(1, 7), examples)


def summed_at_once() -> None:
    with process_group(timeout_s=250):
        algorithms = [build(P2P()) for build in ALGORITHMS]
        inputs = [drawn((10_000, torch.float32), seed) for seed in range(20)]
        results = {algorithm: [tensor.clone() for tensor in inputs] for algorithm in algorithms}
        pending = [algorithm.start(result) for algorithm in algorithms for result in results[algorithm]]
        for tensor in inputs:
            dist.all_reduce(tensor)
        for work in pending:
            work.wait()
        for algorithm in algorithms:
            for ours, expected in zip(results[algorithm], inputs, strict=True):
                assert_is_sum(ours, expected)
            algorithm.close()


def test_algorithms_at_once_and_the_groups_own_collectives_do_not_disturb_each_other() -> None:
    run_ranks(summed_at_once, 3)


def summed_in_subgroups() -> None:
    with process_group(timeout_s=250) as env:
        even, odd = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
        group = cast(dist.ProcessGroup, odd if env.rank % 2 else even)
        all_ranks = P2P()
        odd_ones = all_ranks.among([3, 1]) if env.rank % 2 else None
        for build in ALGORITHMS:
            tensor = drawn((1000, torch.float64), 0)
            expected = tensor.clone()
            dist.all_reduce(expected, group=group)
            ours = tensor.clone()
            build(P2P(group)).run(ours)
            assert_is_sum(ours, expected)
            if odd_ones and build is not watched_backend:
                ours = tensor.clone()
                build(odd_ones).run(ours)
                assert_is_sum(ours, expected)


def test_only_the_groups_ranks_are_summed() -> None:
    run_ranks(summed_in_subgroups, 5)


def sum_until_lost(victim: int, build: Build, death: signal.Signals, timeout_s: float) -> tuple[object, str]:
    """All-reduces without end, during which the victim sends itself a signal; returns the rank that this one names."""
    with process_group(timeout_s=600) as env:
        dist.barrier()  # ranks start at different times; the short timeout is for their sums
        group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
        assert isinstance(group, dist.ProcessGroup)
        algorithm = build(P2P(group))
        buffer = torch.zeros(200_000)
        algorithm.run(buffer)
        if env.rank == victim:
            threading.Timer(0.1, partial(os.kill, os.getpid(), death)).start()
        try:
            while True:
                for pending in [algorithm.start(buffer) for _ in range(3)]:
                    pending.wait()
        except RankLost as lost:
            algorithm.close()
            return lost.rank, str(lost)


@pytest.mark.faults
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("build", ALGORITHMS)
def test_survivors_name_the_rank_that_was_killed(build: Build, victim: int) -> None:
    survivors = run_with_victim(sum_until_lost, 4, victim, build, signal.SIGKILL, 600.0)
    for rank, message in survivors.values():
        assert rank == victim
        assert f"rank {victim} (pid " in message
        assert message.endswith(" ended during an all-reduce")


@pytest.mark.faults
@pytest.mark.parametrize("build", [watched_backend, Ring, HalvingDoubling])
def test_survivors_name_the_rank_that_does_not_answer(build: Build) -> None:
    survivors = run_with_victim(sum_until_lost, 4, 1, build, signal.SIGSTOP, 2.0)
    for rank, message in survivors.values():
        assert rank == 1
        assert message.endswith(" did not answer within 2 s during an all-reduce")
