"""ddp/resilience/replica_check.py: whatever bit differs on whatever rank is found, and named."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from common.distributed.process_group import DistEnv, process_group
from ddp.resilience import replica_check
from ddp.resilience.replica_check import (
    MOST_NAMED,
    ReplicasDiverged,
    differences,
    digest,
    hash_of,
    require_equal_replicas,
)
from tests.support.launch import run_ranks

Flip = tuple[int, str, int]  # rank, parameter, bit
CHANNELS_LAST = torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)


class Network(nn.Module):
    """A parameter of each kind, and a buffer that is each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.conv = nn.Conv2d(3, 4, (5, 2)).to(memory_format=torch.channels_last)
        self.fp16 = nn.Parameter(torch.empty(7, dtype=torch.float16))
        self.bf16 = nn.Parameter(torch.empty(3, 5, dtype=torch.bfloat16).t())
        self.fp64 = nn.Parameter(torch.empty(2, 2, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.empty(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.nan = nn.Parameter(torch.empty(65, 100))
        self.frozen = nn.Parameter(torch.empty(3, dtype=torch.int32), requires_grad=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(100 * torch.randn(parameter.shape, generator=generator))
            self.nan.fill_(torch.nan)
        self.register_buffer("own", torch.full((2,), float(rank)))


BITS = {name: 8 * parameter.nbytes for name, parameter in Network(0).named_parameters() if parameter.nbytes}
bits = st.sampled_from(sorted(BITS)).flatmap(lambda name: st.tuples(st.just(name), st.integers(0, BITS[name] - 1)))


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Examples to be tried within one job."""
    examples = []

    @settings(max_examples=count)
    @given(strategy)
    def draw(example: Any) -> None:
        examples.append(example)

    draw()
    return examples


def check(cases: list[list[Flip]]) -> list[str | None]:
    """On a rank: what is said of each case."""
    with process_group("cpu", threads=1) as env:
        network = Network(env.rank)
        return [check_one(network, env, flips) for flips in cases]


def check_one(network: nn.Module, env: DistEnv, flips: list[Flip]) -> str | None:
    def flip() -> None:
        for rank, name, bit in flips:
            if rank == env.rank:
                storage = network.get_parameter(name).untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage)[bit // 8] ^= 1 << bit % 8

    flip()
    try:
        require_equal_replicas(network, env, step=50)
    except ReplicasDiverged as error:
        return str(error)
    finally:
        flip()
    return None


def test_a_flipped_bit_is_named_on_all_of_three_ranks() -> None:
    cases: list[list[Flip]] = [
        [(rank, name, bit)] for rank, (name, bit) in drawn(st.tuples(st.integers(0, 2), bits), 200)
    ]
    cases += [[(bit % 3, name, bit)] for name in ("fp16", "scalar", "frozen") for bit in range(BITS[name])]
    said = run_ranks(check, 3, [[], *cases, []])
    expected = [
        f"at step 50 the replicas have diverged: parameter {name!r} differs on rank {rank} of 3"
        for [(rank, name, _)] in cases
    ]
    assert said == [[None, *expected, None]] * 3


def check_by_hashes(cases: list[list[Flip]]) -> tuple[list[str | None], list[int]]:
    """As on a GPU: what is said of each case, and how many digests were made on the host for it."""
    digests: list[Tensor] = []
    counts = []

    def counted(tensor: Tensor) -> int:
        digests.append(tensor)
        return digest(tensor)

    said = []
    with (
        process_group("cpu", threads=1) as env,
        mock.patch.object(replica_check, "HASHING_DEVICES", ("cpu",)),
        mock.patch.object(replica_check, "digest", counted),
    ):
        network = Network(env.rank)
        for flips in cases:
            digests.clear()
            said.append(check_one(network, env, flips))
            counts.append(len(digests))
    return said, counts


def test_hashes_find_what_digests_find_which_are_made_only_then() -> None:
    cases: list[list[Flip]] = [
        [(rank, name, bit)] for rank, (name, bit) in drawn(st.tuples(st.integers(0, 2), bits), 50)
    ]
    cases += [[(bit % 3, name, bit)] for name in ("fp16", "scalar", "nan", "frozen") for bit in range(8 * 4)]
    expected = [
        f"at step 50 the replicas have diverged: parameter {name!r} differs on rank {rank} of 3"
        for [(rank, name, _)] in cases
    ]
    parameters = len(list(Network(0).parameters()))
    for said, digests in run_ranks(check_by_hashes, 3, [[], *cases, []]):
        assert said == [None, *expected, None]
        assert digests == [0, *[parameters] * len(cases), 0]


def test_several_flipped_bits_are_named_as_far_as_one_can_tell() -> None:
    """The ranks agree about each parameter as far as the same bits of it are flipped."""
    cases = drawn(st.lists(st.tuples(st.integers(0, 2), bits).map(lambda flip: (flip[0], *flip[1])), max_size=9), 100)
    expected = []
    for flips in cases:
        states = {}
        for name, _ in Network(0).named_parameters():
            odd: list[set[int]] = [set(), set(), set()]
            for rank, flipped, bit in flips:
                if flipped == name:
                    odd[rank] ^= {bit}
            states[name] = [hash(frozenset(bits)) for bits in odd]
        found = differences(list(states), list(states.values()))
        more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        words = f"at step 50 the replicas have diverged: {', '.join(found[:MOST_NAMED])}{more}"
        expected.append(words if found else None)
    assert run_ranks(check, 3, cases) == [expected] * 3


def test_of_two_ranks_none_is_blamed() -> None:
    said = run_ranks(check, 2, [[(1, "scalar", 3)]])
    assert said == [["at step 50 the replicas have diverged: parameter 'scalar' differs between the 2 ranks"]] * 2


@pytest.mark.parametrize(
    "values, words",
    [
        ([7, 7, 7, 7], []),
        ([7, 8, 7, 7], ["parameter 'w' differs on rank 1 of 4"]),
        ([8, 7, 9, 7, 7], ["parameter 'w' differs on ranks 0, 2 of 5"]),
        ([7, 7, 8, 8], ["parameter 'w' differs between the 4 ranks"]),
        ([7, 7, 8, 9, 10], ["parameter 'w' differs between the 5 ranks"]),
    ],
)
def test_a_minority_is_blamed(values: list[int], words: list[str]) -> None:
    assert differences(["w"], [values]) == words


def test_alone_there_is_nothing_to_compare() -> None:
    require_equal_replicas(Network(0), DistEnv.alone(torch.device("cpu")), step=0)


@pytest.mark.parametrize("tensor", [CHANNELS_LAST, CHANNELS_LAST[:, :, ::2], CHANNELS_LAST[0, 0].t()])
def test_strides_of_any_kind(tensor: Tensor) -> None:
    changed = tensor.clone()
    assert digest(changed) == digest(tensor)
    changed[(-1,) * changed.dim()] += 1
    assert digest(changed) != digest(tensor)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.float8_e4m3fn])
def test_any_dtype_has_a_hash(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 2).to(dtype)
    changed = tensor.clone()
    changed[1, 1] = 0
    for one in (tensor, tensor[0], tensor[0, 0]):
        assert hash_of(one).dtype == torch.int64 and hash_of(one).shape == ()
    assert hash_of(changed) != hash_of(tensor)


@pytest.mark.gpu
def test_a_gpu_has_the_same_hashes() -> None:
    for parameter in (
        *Network(0).parameters(),
        torch.ones(3).to(torch.complex64),
        torch.ones(5).to(torch.float8_e4m3fn),
    ):
        assert hash_of(parameter) == hash_of(parameter.cuda()).cpu()


@pytest.mark.gpu
def test_a_gpu_has_the_same_digests() -> None:
    for parameter in Network(0).parameters():
        assert digest(parameter) == digest(parameter.cuda())
