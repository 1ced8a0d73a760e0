"""ddp/all_reduce/hierarchical.py: on hosts of any sizes it sums as torch does, and names a rank that was lost on another host."""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings

from common.distributed.process_group import process_group
from ddp.all_reduce import shared_memory
from ddp.all_reduce.hierarchical import Hierarchical
from ddp.all_reduce.p2p import P2P
from tests.ddp.all_reduce.test_algorithms import Case, lists_of_cases, sum_until_lost
from tests.ddp.all_reduce.test_shared_memory import MANY_PIECES, digests
from tests.support.launch import run_ranks, run_with_victim

# Each rank's host, as a letter; the layouts with most ranks first.
LAYOUTS = ["aabbbc", "abab", "aaab", "abc", "aa"]


def summed(layouts: list[str], examples: list[Case]) -> list[list[int]]:
    """Digests of the sums, for each layout that has this rank."""
    found = []
    with process_group(timeout_s=250) as env, contextlib.ExitStack() as patches:
        for name, value in MANY_PIECES.items():
            patches.enter_context(mock.patch.object(shared_memory, name, value))
        for hosts in layouts:
            group = dist.new_group(list(range(len(hosts))))
            if env.rank < len(hosts):
                assert isinstance(group, dist.ProcessGroup)
                all_reduce = Hierarchical(P2P(group), hosts)
                found.append(digests(all_reduce, examples, group))
                all_reduce.close()
    return found


def assert_same_sums(examples: list[Case]) -> None:
    results = run_ranks(summed, 6, LAYOUTS, examples, timeout_s=280)
    for found in results:
        assert found == results[0][: len(found)]
    assert [len(found) for found in results] == [sum(len(hosts) > rank for hosts in LAYOUTS) for rank in range(6)]


@settings(max_examples=1, phases=[Phase.generate])  # to shrink would start hundreds of jobs
@given(examples=lists_of_cases(6))
def test_it_sums_as_torch_does_to_the_same_bits_on_all_ranks(examples: list[Case]) -> None:
    assert_same_sums(examples)


@pytest.mark.slow
@settings(max_examples=5, phases=[Phase.generate])
@given(examples=lists_of_cases(10))
def test_it_sums_as_torch_does_in_many_cases(examples: list[Case]) -> None:
    assert_same_sums(examples)


def summed_where_they_are() -> None:
    with process_group(timeout_s=250) as env:
        for pretended in (False, True):
            name = f"node-{env.rank % 2}" if pretended else "node"
            with mock.patch("socket.gethostname", return_value=name):
                all_reduce = Hierarchical(P2P())
                ones = all_reduce.allocate(100_000, torch.float32, torch.device("cpu")).fill_(1)
                all_reduce.run(ones)
                assert (ones == env.world_size).all()
                all_reduce.close()


def test_it_determines_the_host_of_each_rank() -> None:
    run_ranks(summed_where_they_are, 3)


@pytest.mark.faults
@pytest.mark.parametrize(("hosts", "victim"), [("aabb", 0), ("aabb", 3), ("aaab", 2), ("aaab", 3), ("abc", 1)])
def test_all_hosts_name_the_rank_that_was_killed(hosts: str, victim: int) -> None:
    build = partial(Hierarchical, hosts=hosts)
    for rank, message in run_with_victim(sum_until_lost, len(hosts), victim, build, signal.SIGKILL, 600.0).values():
        assert rank == victim
        assert message.startswith(f"rank {victim} (pid ")
        assert message.endswith(" ended during an all-reduce")


@pytest.mark.faults
@pytest.mark.parametrize(("hosts", "victim"), [("aabb", 0), ("aaab", 1)])
def test_all_hosts_name_the_rank_that_does_not_answer(hosts: str, victim: int) -> None:
    build = partial(Hierarchical, hosts=hosts)
    for rank, message in run_with_victim(sum_until_lost, len(hosts), victim, build, signal.SIGSTOP, 2.0).values():
        assert rank == victim
        assert message.endswith(" did not answer within 2 s during an all-reduce")
