"""ddp/all_reduce/sharded.py: a reduce-scatter and an all-gather alone sum and collect as torch's own do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp.all_reduce.choice import backend
from ddp.all_reduce.p2p import P2P
from ddp.all_reduce.ring import Ring
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.all_reduce.shared_memory import SCRATCH_BYTES, SharedMemory
from ddp.rendezvous.process_group import process_group
from tests.ddp.all_reduce.sent_bytes import RANKS
from tests.ddp.all_reduce.test_algorithms import TOLERANCES
from tests.support.launch import REPOSITORY, clean_environment, run_ranks

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
        algorithm = build(P2P())
        size, rank = env.world_size, env.rank
        for case in examples:
            if case[2] and not case[0]:
                continue
            buffer = drawn(case, size, algorithm, rank)
            expected, whole = buffer.clone(), buffer.clone()
            dist.all_reduce(expected)
            algorithm.run(whole)
            own = slice(rank * case[0], (rank + 1) * case[0])
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
        algorithm.close()


@pytest.mark.parametrize("build", [backend, Ring, SharedMemory])
@settings(max_examples=1, phases=[Phase.generate])
@given(examples=st.lists(cases, min_size=5, max_size=5, unique=True))
def test_both_are_torchs_and_together_the_all_reduce(
    build: Callable[[P2P], ShardedAllReduce], examples: list[Case]
) -> None:
    """Reduce-scatter and all-gather give torch's results, and one after the other the bits of the all-reduce.

    Claim (ddp/sharded/README.md, 1): a reduce-scatter and an all-gather are an all-reduce, by ring, shared memory and
    gloo.
    """
    for ranks in (1, 2, 4):
        run_ranks(check, ranks, build, [*examples, (LARGE, torch.float32, False), (LARGE, torch.bfloat16, True)])


@pytest.mark.examples
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root, for a network namespace")
def test_what_each_sends() -> None:
    """Half of an all-reduce, but for gloo's reduce-scatter, which is a whole one."""
    command = f"ip link set lo up && exec {sys.executable} -m tests.ddp.all_reduce.sent_bytes"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", command],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout)
    whole = 2 * (RANKS - 1) / RANKS  # of the tensor; barriers and gloo's headers are less than 1 % more
    for name, expected in {"backend": (1, 1, 0.5), "ring": (1, 0.5, 0.5)}.items():
        assert list(times[name].values()) == pytest.approx([whole * part for part in expected], rel=0.01), name
