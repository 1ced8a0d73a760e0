"""A restarted job must not find what the one before it has left in the store.

Under torchrun the store lives in an agent, and outlives the ranks: in torch 2.15 all attempts see the same keys. A restarted
rank may read the addresses of ranks that are dead, and gloo tries to connect to them (``connectFullMesh ... Connection
refused``, or a hang). No number in the environment tells the attempts apart, since torchrun does not count those after a
change of nodes. So the ranks that are alive now agree on a prefix: each asks under a name that nobody has used before, and
only a living rank 0 answers that.
"""

from __future__ import annotations

import datetime
import os
import time
import uuid

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

POLL_S = 0.01


def store_of_this_attempt(rank: int, world_size: int, timeout: datetime.timedelta) -> Store:
    """The store of torchrun's agent, as if it were new.

    :raises torch.distributed.DistStoreError: when not all ranks come in time, or RuntimeError for no store at all
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return PrefixStore(agree_on_prefix(store, rank, world_size, timeout), store)


def agree_on_prefix(store: Store, rank: int, world_size: int, timeout: datetime.timedelta) -> str:
    """The same on all ranks that call this now, and unlike any before. Rank 0 returns when all others have come.

    :raises torch.distributed.DistStoreError: when not all ranks come in time, or no rank 0
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"asks/{rank}", mine)
        answer: str = store.get(f"answers/{mine}").decode()
        store.set(f"{answer}/heard/{rank}", "")
        return answer
    absent = set(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while absent:
        for other in sorted(absent):
            if store.check([f"asks/{other}"]):  # it may be one that is dead; the living one will ask after it
                store.set(f"answers/{store.get(f'asks/{other}').decode()}", mine)
            if store.check([f"{mine}/heard/{other}"]):
                absent.remove(other)
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {sorted(absent)} did not come")
        time.sleep(POLL_S)
    return mine
