"""A prefix for the keys of each start of a job, so that a restarted job does not read the keys of the start before.

Under torchrun the store lives in an agent and outlives the ranks: in torch 2.15, all restarts see the same keys. A restarted
rank may read the addresses of dead ranks, and gloo tries to connect to them (``connectFullMesh ... Connection refused``, or a
hang). No number in the environment tells the restarts apart, since torchrun does not count those after a change of nodes. So
the living ranks agree on a prefix: each asks under a new random name, which only a living rank 0 answers.

NCCL writes past any prefix. After a timeout in a collective it sets a key at which the other ranks' processes end, to write down
what they did (ProcessGroupNCCL.cpp, ``HeartbeatMonitor::runLoop``). A restart that finds the key would be ended by it some
eight minutes later. So rank 0 deletes such keys first.
"""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.distributed import STORE_POLL_S

# HACK: torch exports them nowhere. Under other names, a restart ends some eight minutes after its start.
NCCL_S_KEYS = ("exception_dump", "remote_error")  # kStoreDumpKey and kStoreErrorSignalKey of ProcessGroupNCCL.hpp


def agree_on_prefix(store: Store, rank: int, world_size: int, timeout_s: float) -> str:
    """A new random prefix, the same on all ranks that call this now. Rank 0 returns when all others have called it. Keys that NCCL has
    left in the store are deleted before any rank has the prefix.

    :param store: the store that outlives the ranks
    :param rank: this rank
    :param world_size: number of ranks
    :param timeout_s: how long rank 0 waits for the others
    :raises torch.distributed.DistStoreError: when not all ranks come in time, or rank 0 does not
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", mine)
        answer: str = store.get(f"answers/{mine}").decode()
        store.set(f"{answer}/heard/{rank}", "")
        return answer
    for key in NCCL_S_KEYS:
        store.delete_key(key)
    absent = set(range(1, world_size))
    deadline = time.monotonic() + timeout_s
    while absent:
        for other in sorted(absent):
            if store.check([f"asks/{other}"]):  # perhaps of a dead rank; the living one overwrites it
                store.set(f"answers/{store.get(f'asks/{other}').decode()}", mine)
            if store.check([f"{mine}/heard/{other}"]):
                absent.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(absent)} did not come")
        time.sleep(STORE_POLL_S)
    return mine
