"""ddp/resilience/replica_check.py: whatever bit differs on whatever rank is found, and named."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from common.distributed.dist_env import DistEnv
from ddp.rendezvous.process_group import process_group
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
# Bits of every parameter, the first, the last and some between, on one rank after the other.
CASES: list[Flip] = [
    (number % 3, name, bit)
    for name, count in BITS.items()
    for number, bit in enumerate(sorted({count - 1, *(part * count // 40 for part in range(40))}))
]


def check(cases: list[list[Flip]], by_hashes: bool = False) -> tuple[list[str | None], list[int]]:
    """On a rank: the message of each case, and how many digests were made on the host for it.

    :param by_hashes: as on a GPU
    """
    digests: list[Tensor] = []

    def counted(tensor: Tensor) -> int:
        digests.append(tensor)
        return digest(tensor)

    messages, counts = [], []
    with (
        process_group("cpu", threads=1) as env,
        mock.patch.object(replica_check, "HASHING_DEVICES", ("cpu",) if by_hashes else ()),
        mock.patch.object(replica_check, "digest", counted),
    ):
        network = Network(env.rank)
        for flips in cases:
            digests.clear()
            messages.append(check_one(network, env, flips))
            counts.append(len(digests))
    return messages, counts


def check_one(network: nn.Module, env: DistEnv, flips: list[Flip]) -> str | None:
    def flip() -> None:
        for rank, name, bit in flips:
            if rank == env.rank:
                storage = network.get_parameter(name).untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(storage)[bit // 8] ^= 1 << bit % 8

    flip()
    try:
        require_equal_replicas(network, step=50)
    except ReplicasDiverged as error:
        return str(error)
    finally:
        flip()
    return None


@pytest.mark.parametrize("by_hashes", [False, True])
def test_a_flipped_bit_is_named_on_all_of_three_ranks(by_hashes: bool) -> None:
    """All three ranks name the tensor and the rank of a flipped bit.

    Where a GPU hashes the parameters, the host makes no digests.

    Claim (ddp/resilience/README.md): when replicas differ, the tensor and the rank are named.
    Claim (ddp/resilience/README.md): on a GPU, replicas are compared by hashes that it makes itself.
    """
    expected = [
        f"at step 50 the replicas have diverged: parameter {name!r} differs on rank {rank} of 3"
        for rank, name, _ in CASES
    ]
    made = 0 if by_hashes else len(list(Network(0).parameters()))
    for messages, digests in run_ranks(check, 3, [[], *([flip] for flip in CASES), []], by_hashes):
        assert messages == [None, *expected, None]
        assert digests == [made] * (len(CASES) + 2)


def test_several_flipped_bits_are_named_as_far_as_there_is_room() -> None:
    names = list(BITS)[: MOST_NAMED + 2]
    for messages, _ in run_ranks(check, 3, [[(1, name, 0) for name in names]]):
        named = ", ".join(f"parameter {name!r} differs on rank 1 of 3" for name in names[:MOST_NAMED])
        assert messages == [f"at step 50 the replicas have diverged: {named}, and 2 more"]


@pytest.mark.parametrize(
    "values, words",
    [
        ([7, 7, 7, 7], []),
        ([7, 8], ["parameter 'w' differs between the 2 ranks"]),
        ([7, 8, 7, 7], ["parameter 'w' differs on rank 1 of 4"]),
        ([8, 7, 9, 7, 7], ["parameter 'w' differs on ranks 0, 2 of 5"]),
        ([7, 7, 8, 8], ["parameter 'w' differs between the 4 ranks"]),
        ([7, 7, 8, 9, 10], ["parameter 'w' differs between the 5 ranks"]),
    ],
)
def test_a_minority_is_blamed(values: list[int], words: list[str]) -> None:
    assert differences(["w"], [values]) == words


def test_alone_there_is_nothing_to_compare() -> None:
    require_equal_replicas(Network(0), step=0)


@pytest.mark.parametrize("tensor", [CHANNELS_LAST, CHANNELS_LAST[:, :, ::2], CHANNELS_LAST[0, 0].t()])
def test_strides_of_any_kind(tensor: Tensor) -> None:
    """The checksum of a tensor of any strides depends on its values, and on each of them."""
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
def test_a_gpu_has_the_same_hashes_and_digests() -> None:
    for parameter in (
        *Network(0).parameters(),
        torch.ones(3).to(torch.complex64),
        torch.ones(5).to(torch.float8_e4m3fn),
    ):
        assert hash_of(parameter) == hash_of(parameter.cuda()).cpu()
        assert digest(parameter) == digest(parameter.cuda())
