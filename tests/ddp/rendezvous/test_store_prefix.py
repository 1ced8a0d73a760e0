"""ddp/rendezvous/store_prefix.py: ranks that are alive now find each other in a store that is full of what the dead have left."""

from __future__ import annotations

import datetime
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ddp.rendezvous.store_prefix import agree_on_prefix

PATIENT, HASTY = datetime.timedelta(seconds=60), datetime.timedelta(seconds=0.5)


@pytest.fixture
def server() -> TCPStore:
    """The store that an agent serves, which outlives the ranks."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ranks(
    server: TCPStore, world_size: int, present: list[int] | None = None, timeout: datetime.timedelta = PATIENT
) -> list[Future[str]]:
    """One start of a job with these ranks (all, when None), each with a connection of its own; returns when it is over."""

    def rank(number: int) -> str:
        store = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
        return agree_on_prefix(store, number, world_size, timeout.total_seconds())

    with ThreadPoolExecutor(world_size) as threads:
        return [threads.submit(rank, number) for number in (range(world_size) if present is None else present)]


def agreed(server: TCPStore, world_size: int) -> str:
    prefixes = {future.result() for future in ranks(server, world_size)}
    assert len(prefixes) == 1
    return prefixes.pop()


def test_each_start_agrees_on_another_prefix_whatever_its_size(server: TCPStore) -> None:
    """Each start of a job, of any world size, agrees on a new prefix in the store.

    Claim (ddp/resilience/README.md): a restart agrees on a prefix of its own in the store, without what NCCL has left there.
    """
    sizes = (3, 3, 3, 2, 4, 1, 4)
    assert len({agreed(server, size) for size in sizes}) == len(sizes)


def test_ranks_that_asked_and_died_are_not_waited_for(server: TCPStore) -> None:
    prefixes = {agreed(server, 3)}
    for present in ([1], [1, 2], [0, 2], [0]):  # in [0, 2] rank 2 has been answered, before it died
        first, *_ = ranks(server, 3, present, HASTY)
        with pytest.raises(dist.DistStoreError):
            first.result()
        prefixes.add(agreed(server, 3))
    assert len(prefixes) == 5


def test_a_restart_is_not_ended_by_what_nccl_has_left(server: TCPStore) -> None:
    """A restart is not ended by the key that NCCL leaves in the store after a timeout.

    After a timeout NCCL leaves a key outside any prefix, and a process that finds it ends itself minutes later.

    Claim (ddp/resilience/README.md): a restart agrees on a prefix of its own in the store, without what NCCL has left there.
    """
    keys = ["exception_dump", "remote_error"]
    for key in keys:
        server.set(key, "1")
    agreed(server, 2)
    assert not any(server.check([key]) for key in keys)
