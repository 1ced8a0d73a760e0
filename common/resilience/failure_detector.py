"""The failure detector: what the ranks report to each other through the job's store, and the decision that all accept.

A failure spreads. In a ring, rank 1 sees rank 0's connection close, gives up and leaves; then rank 2 sees rank 1's connection
close. So no rank decides alone which rank failed first. Each reports what it sees. A rank that has to know reads all reports
and proposes a decision, and the first proposal that reaches the store is the decision of all ranks.

There are two kinds of reports, for two kinds of failures:

common/resilience/heartbeats.py   where a rank's main thread is, once a second, or that it has failed; for ranks that wait without end
common/resilience/suspicions.py   which rank should have answered; from ranks whose send or receive failed
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class FailureDetector:
    """The reports and the decision of the ranks of one group. Every method waits for the store, which may not answer.

    :param key: prefix of its keys in the store; used once, since torchrun's store outlives a job
    :param rank: this rank in the group
    :param world_size: ranks in the group
    """

    def __init__(self, key: str, rank: int, world_size: int) -> None:
        self._report_keys = [f"{key}/report/{rank}" for rank in range(world_size)]
        self._own_key, self._decision_key, self._count_key = self._report_keys[rank], f"{key}/decision", f"{key}/count"
        self._job_store: Any = dist.distributed_c10d._get_default_store()
        self._store = self._job_store

    def connect(self) -> None:
        """Use a connection of its own from now on: on the job's, the main thread may wait for something else."""
        self._store = self._job_store.clone()

    def disconnect(self) -> None:
        """Close that connection."""
        self._store = self._job_store

    def report(self, text: str) -> None:
        """Replace this rank's report."""
        self._store.set(self._own_key, text)

    def reports(self) -> dict[int, str]:
        """The latest report of each rank that has made one."""
        ranks = list(range(len(self._report_keys)))
        if not self._store.check(self._report_keys):  # a get would wait for a report that was never made
            ranks = [rank for rank in ranks if self._store.check([self._report_keys[rank]])]
        texts = self._store.multi_get([self._report_keys[rank] for rank in ranks])
        return {rank: text.decode() for rank, text in zip(ranks, texts, strict=True)}

    def propose(self, decision: str) -> str:
        """Propose a decision; returns the one that counts: this one, unless another rank's came first."""
        return str(self._store.compare_set(self._decision_key, "", decision).decode())

    def decision(self) -> str | None:
        """The decision, if a rank has proposed one."""
        return self._store.get(self._decision_key).decode() if self._store.check([self._decision_key]) else None

    def count(self) -> int:
        """How often the ranks have called this, all together."""
        return int(self._store.add(self._count_key, 1))

    def delete(self) -> None:
        """Delete all keys from the store."""
        for key in (*self._report_keys, self._decision_key, self._count_key):
            self._store.delete_key(key)
