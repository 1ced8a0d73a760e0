"""ddp/all_reduce/sharded.py: a reduce-scatter and an all-gather alone sum and collect as torch's own do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.distributed.process_group import process_group
from ddp.all_reduce.choice import watched_backend
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.ring import Ring
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.all_reduce.shared_memory import SCRATCH_BYTES, SharedMemory
from tests.ddp.all_reduce.test_algorithms import TOLERANCES
from tests.support.launch import run_ranks

LARGE = SCRATCH_BYTES // 4 + 3  # elements per shard: more than shared memory copies at once

Case = tuple[int, torch.dtype, bool]  # elements per shard, dtype, whether the buffer lies in allocated memory
cases = st.tuples(st.integers(0, 20) | st.integers(0, 5000), st.sampled_from(list(TOLERANCES)), st.booleans())


def drawn(case: Case, size: int, algorithm: ShardedAllReduce, rank: int) -> Tensor:
    """A rank's tensor of a case, of all its shards."""
    numel, dtype, allocated = case
    values = torch.randn(numel * size, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return algorithm.allocate(len(values), dtype, values.device).copy_(values) if allocated else values


def check(build: Callable[[P2P], ShardedAllReduce], examples: Sequence[Case]) -> None:
    with process_group(timeout_s=100) as env:
        p2p = P2P()
        algorithm = build(p2p)
        size, rank = env.world_size, env.rank
        for case in examples:
            if case[2] and not case[0]:
                continue
            buffer = drawn(case, size, algorithm, rank)
            expected, whole = buffer.clone(), buffer.clone()
            dist.all_reduce(expected)
            algorithm.run(whole)
            own = slice(rank * case[0], (rank + 1) * case[0])
            before = p2p.sent_bytes
            algorithm.start_reduce_scatter(buffer).wait()
            tolerance = TOLERANCES[case[1]]
            torch.testing.assert_close(buffer[own], expected[own], rtol=tolerance, atol=tolerance)

            buffer[: own.start] = 7
            buffer[own.stop :] = 7
            sent = buffer[own].clone()
            shards = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(shards, sent)
            algorithm.start_all_gather(buffer).wait()
            assert torch.equal(buffer, torch.cat(shards))
            if size <= 2:  # sums of two terms have the same bits in whatever order
                assert torch.equal(buffer, whole)
            if isinstance(algorithm, Ring):
                assert p2p.sent_bytes - before == 2 * (size - 1) * sent.nbytes
        algorithm.close()


@pytest.mark.parametrize("build", [watched_backend, Ring, SharedMemory])
@settings(max_examples=1, phases=[Phase.generate])
@given(examples=st.lists(cases, min_size=5, max_size=5, unique=True))
def test_both_are_torchs_and_together_the_all_reduce(
    build: Callable[[P2P], ShardedAllReduce], examples: list[Case]
) -> None:
    for ranks in (1, 2, 4):
        run_ranks(check, ranks, build, [*examples, (LARGE, torch.float32, False), (LARGE, torch.bfloat16, True)])
