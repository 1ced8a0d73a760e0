"""Bytes that each all-reduce, its reduce-scatter and its all-gather send, as the connections of a network namespace count them.

    unshare --net sh -c 'ip link set lo up && python -m tests.ddp.all_reduce.sent_bytes'

Prints, as JSON, how often each sends the tensor, per rank.
"""

from __future__ import annotations

import json
import re
import subprocess

import torch
import torch.distributed as dist

from ddp.all_reduce.choice import build_all_reduce
from ddp.all_reduce.sharded import ShardedAllReduce
from ddp.rendezvous.process_group import process_group
from tests.support.ranks import close_pool, run_ranks

NUMEL = 4_000_000
RANKS = 4


def count(name: str) -> dict[str, float]:
    """For an all-reduce, its reduce-scatter and its all-gather: the bytes on the wire by those of the tensor, per rank."""
    with process_group(timeout_s=100) as env:
        algorithm = build_all_reduce(name)
        assert isinstance(algorithm, ShardedAllReduce)
        tensor, times = torch.ones(NUMEL), {}
        for what in (algorithm.run, algorithm.reduce_scatter, algorithm.all_gather):
            what(tensor)  # the first connects the ranks
            dist.barrier()
            before = sent()
            dist.barrier()
            what(tensor)
            dist.barrier()
            times[what.__name__] = (sent() - before) / tensor.nbytes / env.world_size
            dist.barrier()
        algorithm.close()
        return times


def sent() -> int:
    """Bytes that all TCP connections here have sent, each once: on a busy machine TCP sends some again."""
    listed = subprocess.run(["ss", "-tinH"], check=True, capture_output=True, text=True).stdout
    counts = {word: sum(map(int, re.findall(rf"{word}:(\d+)", listed))) for word in ("bytes_sent", "bytes_retrans")}
    return counts["bytes_sent"] - counts["bytes_retrans"]


if __name__ == "__main__":
    print(json.dumps({name: run_ranks(count, RANKS, name)[0] for name in ("backend", "ring")}))
    close_pool()
