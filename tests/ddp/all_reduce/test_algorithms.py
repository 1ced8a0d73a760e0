"""ddp/all_reduce/: all algorithms sum as torch's own all-reduce does, to the same bits on all ranks, and name a lost rank."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp.all_reduce import shared_memory
from ddp.all_reduce.base import AllReduce
from ddp.all_reduce.choice import backend
from ddp.all_reduce.halving_doubling import HalvingDoubling
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.naive import Naive
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.ring import Ring
from ddp.all_reduce.shared_memory import SMALL_BYTES, SharedMemory
from ddp.all_reduce.tree import Tree
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks, run_with_victim
from tests.support.ranks import run_in_group

Build = Callable[[P2P], AllReduce]
BY_HAND: list[Build] = [Naive, Ring, HalvingDoubling, Tree]
ALGORITHMS: list[Build] = [backend, *BY_HAND]
TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.float64: 1e-12}
DTYPES = [torch.uint8, torch.int32, torch.int64, *TOLERANCES]
CPU = torch.device("cpu")

# Each rank's host, as a letter; the layouts with most ranks first.
ONE_HOST = ["aaaaaa", "aaaaa", "aaaa", "aaa", "aa", "a"]
HOSTS = ["aabbbc", "abab", "aaab", "abc", "aa"]
# So small that drawn tensors have several blocks, and are copied in several chunks.
MANY_CHUNKS = {"SMALL_BYTES": 200, "SCRATCH_BYTES": 8192, "BLOCK_BYTES": 512}

Case = tuple[int, torch.dtype]  # numel, dtype
LARGE: list[Case] = [(300_007, torch.float32), (200_003, torch.bfloat16)]
AROUND_SMALL: list[Case] = [(SMALL_BYTES + change, torch.uint8) for change in (-1, 0, 1)]
cases = st.tuples(st.integers(0, 20) | st.integers(0, 5000), st.sampled_from(DTYPES))


NOT_FLAT = (torch.ones(2, 3), torch.ones(3, 2)[:, 0], torch.ones(()), torch.ones(3, 2).t()[0])


def refusals() -> list[str]:
    """The words of all algorithms to a matrix, a column and a number."""
    texts = []
    for use in (use for algorithm in every_algorithm() for use in (algorithm.run, algorithm.start)):
        for buffer in NOT_FLAT:
            with pytest.raises(ValueError, match="an all-reduce takes a tensor that is 1-d and contiguous") as error:
                use(buffer)
            texts.append(str(error.value))
    return texts


def run_while_another_runs() -> None:
    for algorithm in every_algorithm():
        started, ones = torch.ones(300_000), [torch.ones(3) for _ in range(20)]
        pending = algorithm.start(started)
        for buffer in ones:
            algorithm.run(buffer)
        pending.wait()
        for buffer in (started, *ones):
            assert buffer.unique().tolist() == [dist.get_world_size()]


def every_algorithm() -> Iterator[AllReduce]:
    for build in (*ALGORITHMS, SharedMemory):
        algorithm = build(P2P())
        yield algorithm
        algorithm.close()


def test_what_is_not_flat_is_refused_by_all_ranks() -> None:
    first, *others = run_in_group(refusals, 3)
    assert all(texts == first for texts in others)
    assert "not [3] with strides [2]: give it .contiguous().view(-1)" in first[1]


def test_a_sum_waits_for_those_that_were_started() -> None:
    run_in_group(run_while_another_runs, 3)


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


def checksums(all_reduce: AllReduce, examples: list[Case], group: dist.ProcessGroup) -> list[int]:
    """Checksums of the examples' sums, which are compared with torch's: of plain tensors, of allocated ones and of parts of
    those. A third of the sums are started all at once."""
    results, expected = [], []
    for seed, case in enumerate(examples):
        tensor = drawn(case, seed)
        expected.append(tensor.clone())
        dist.all_reduce(expected[-1], group=group)
        if seed % 2:
            before = seed % 3
            memory = all_reduce.allocate(before + tensor.numel(), tensor.dtype, CPU)
            assert not memory.any()
            tensor = memory[before:].copy_(tensor)
        results.append(tensor)
    third = len(results) // 3
    for result in results[third:]:
        all_reduce.run(result)
    for pending in [all_reduce.start(result) for result in results[:third]]:
        pending.wait()
    for ours, theirs in zip(results, expected, strict=True):
        assert_is_sum(ours, theirs)
    return [zlib.crc32(result.view(torch.uint8).numpy().tobytes()) for result in results]


def summed(
    builds: list[Build], layouts: list[str], examples: list[Case], constants: Mapping[str, int]
) -> list[list[int]]:
    """The checksums of each algorithm, for each layout that has this rank."""
    sums = []
    with process_group(timeout_s=250) as env, contextlib.ExitStack() as patches:
        for name, value in constants.items():
            patches.enter_context(mock.patch.object(shared_memory, name, value))
        for hosts in layouts:
            group = cast(dist.ProcessGroup, dist.new_group(list(range(len(hosts)))))
            for build in builds if env.rank < len(hosts) else ():
                p2p = P2P(group)
                p2p.host_ids = list(hosts)
                all_reduce = build(p2p)
                sums.append(checksums(all_reduce, examples, group))
                all_reduce.close()
    return sums


def assert_same_sums(builds: list[Build], layouts: list[str], examples: list[Case], **constants: int) -> None:
    results = run_ranks(summed, len(layouts[0]), builds, layouts, examples, constants, timeout_s=280)
    for rank, sums in enumerate(results):
        assert len(sums) == len(builds) * sum(len(hosts) > rank for hosts in layouts)
        assert sums == results[0][: len(sums)]


@settings(max_examples=1, phases=[Phase.generate])  # to shrink would start hundreds of jobs
@given(examples=lists_of_cases(6))
def test_algorithms_sum_as_torch_does_to_the_same_bits_on_all_ranks(examples: list[Case]) -> None:
    """Each algorithm sums as torch does, to the same bits on all ranks.

    Claim (ddp/all_reduce/README.md): every all-reduce sums as torch does, to the same bits on all ranks.
    """
    assert_same_sums(BY_HAND, [hosts for hosts in ONE_HOST if len(hosts) != 5], [*examples, *LARGE])
    assert_same_sums([SharedMemory], ONE_HOST, examples, **MANY_CHUNKS)
    assert_same_sums([Hierarchical], HOSTS, examples, **MANY_CHUNKS)
    assert_same_sums([SharedMemory], ["aaa"], [*AROUND_SMALL, *[(2_500_001, torch.float32)] * 3])


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


def sum_until_lost(victim: int, build: Build, death: signal.Signals, timeout_s: float) -> str:
    """All-reduces without end, during which the victim sends itself a signal; returns the error of this rank."""
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
        except RuntimeError as error:
            algorithm.close()
            return str(error)


def hierarchical(hosts: str, p2p: P2P) -> Hierarchical:
    p2p.host_ids = list(hosts)
    return Hierarchical(p2p)


def on_hosts(hosts: str) -> Build:
    return partial(hierarchical, hosts)


@pytest.mark.faults
@pytest.mark.parametrize(("build", "ranks"), [*((build, 3) for build in ALGORITHMS), (on_hosts("aabb"), 4)])
def test_a_killed_rank_ends_the_sums_of_the_others(build: Build, ranks: int) -> None:
    """All others get an error; none waits for ever.

    Claim (ddp/all_reduce/README.md): a killed rank ends the others' all-reduce with an error.
    """
    assert len(run_with_victim(sum_until_lost, ranks, 1, build, signal.SIGKILL, 600.0)) == ranks - 1


@pytest.mark.faults
@pytest.mark.parametrize("build", [backend, Ring, SharedMemory])
def test_a_rank_that_does_not_answer_ends_the_sums_of_the_others(build: Build) -> None:
    assert len(run_with_victim(sum_until_lost, 3, 1, build, signal.SIGSTOP, 2.0)) == 2
