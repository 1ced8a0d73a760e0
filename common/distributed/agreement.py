"""Before the ranks form a process group: were all started alike?

Two hosts that were given different learning rates would train on without an error, and average gradients that do not belong
together. Other differences would end as a hang, or as a crash in a collective. So each rank puts its *facts* into the store
(ddp/rendezvous/launch_facts.py lists them), rank 0 compares them, and a difference is one line on every rank.

The store is used, and not a collective: ranks that disagree on WORLD_SIZE or on the backend cannot form a group.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.distributed import STORE_POLL_S
from common.errors import UsageError

logger = logging.getLogger(__name__)

OTHERS_S = 2.0  # after a difference is found, for ranks that have not come yet: they are named too
READ_S = 3.0  # for the others to read the verdict: rank 0 may serve the store, and leaves after an error
MOST_DIFFERENCES = 4
MOST_RANKS = 8
UNKNOWN = ""  # a fact that this rank cannot tell: no difference
GPU, GPU_KIND = "the GPU", "the kind of GPU"  # facts that may differ; the first must, where it is known

Facts = Mapping[str, str]


class RanksDiffer(UsageError):
    """The ranks were not started alike, and all know it."""

    seen_by_all = True


def require_agreement(store: Store, rank: int, world_size: int, facts: Facts, timeout_s: float) -> None:
    """Wait until all ranks have called this, and compare their facts.

    :param store: in which no key is an earlier start's
    :param facts: by name, what must be the same on all ranks, and the rank's GPU, which must be another on each
    :param timeout_s: how long to wait for the other ranks
    :raises RanksDiffer: on every rank, naming the facts that differ, the ranks and their values; or when two ranks have the same GPU
    :raises UsageError: on this rank alone, when another process has its number, or the others have begun without it
    :raises torch.distributed.DistStoreError: when not all ranks come in time, or rank 0 does not
    """
    facts = {"WORLD_SIZE": str(world_size), **facts}
    _require_one_process(store, rank)
    store.set(f"facts/{rank}", json.dumps(facts))
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        everyone, verdict = _compare_all(store, world_size, facts, deadline)
        store.set("verdict", verdict or "")
        if verdict:
            wait_for([f"read/{other}" for other in everyone if other > 0], store, time.monotonic() + READ_S)
        elif remark := different_gpus(everyone):
            logger.warning(remark)
    else:
        if wait_for(["verdict"], store, deadline):
            raise dist.DistStoreError("rank 0 did not come")
        # A rank that rank 0 does not know of, since their WORLD_SIZE differs, finds that by itself.
        verdict = store.get("verdict").decode()
        store.set(f"read/{rank}", "")
        if not verdict and (own := describe({0: _facts_of(store, 0), rank: facts})):
            raise UsageError(own)
    if verdict:
        raise RanksDiffer(verdict)


def differences(everyone: Mapping[int, Facts]) -> list[str]:
    """A text for each fact that differs between these ranks: its name, the values, and the ranks that have them."""
    lines = []
    for name in dict.fromkeys(name for facts in everyone.values() for name in facts if name not in (GPU, GPU_KIND)):
        ranks_with = _ranks_by_value(everyone, name, absent="missing")
        if len(ranks_with) > 1:
            first, *others = (f"{value} on {_listed(ranks)}" for value, ranks in ranks_with.items())
            lines.append(f"{name} is {first}, but {' and '.join(others)}")
    return lines


def shared_gpu(everyone: Mapping[int, Facts]) -> str | None:
    """A line that names the first GPU that two ranks or more were given; None if there is none."""
    ranks_with = _ranks_by_value(everyone, GPU)
    for gpu, ranks in ranks_with.items():
        if len(ranks) > 1:
            of_host = f" of {gpu.rpartition(' of ')[2]}"
            count = sum(other.endswith(of_host) for other in ranks_with)
            return (
                f"{_listed(ranks)} have the same GPU, {gpu}, and NCCL needs one for each: start with --nproc_per_node={count}, show "
                "each rank its own by CUDA_VISIBLE_DEVICES, or let them share it with --device cuda --backend gloo"
            )
    return None


def different_gpus(everyone: Mapping[int, Facts]) -> str | None:
    """A line about GPUs of several kinds; None if they are of one."""
    kinds = _ranks_by_value(everyone, GPU_KIND)
    if len(kinds) < 2:
        return None
    listed = ", ".join(f"{kind} on {_listed(ranks)}" for kind, ranks in kinds.items())
    return (
        f"GPUs of different kinds: {listed}: they may round the norm of the same gradients differently, so with --clip-norm the "
        "ranks' weights may diverge in the last bit: use GPUs of one kind, or watch them with --check-replicas-every"
    )


def describe(everyone: Mapping[int, Facts]) -> str | None:
    """All that differs between the facts of these ranks, as one line; None if nothing does."""
    lines = differences(everyone)
    if not lines:
        return shared_gpu(everyone)
    more = len(lines) - MOST_DIFFERENCES
    listed = "; ".join(lines[:MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return f"the ranks were started differently: {listed}: give all the same flags, versions and environment"


def _compare_all(store: Store, world_size: int, facts: Facts, deadline: float) -> tuple[dict[int, Facts], str | None]:
    """Rank 0: the facts of all ranks, and what differs.

    :raises torch.distributed.DistStoreError: when not all come in time
    """
    everyone: dict[int, Facts] = {0: facts}
    differ = False
    while absent := sorted(set(range(world_size)) - everyone.keys()):
        if store.check(["conflict"]):
            return everyone, store.get("conflict").decode()
        came = {rank: _facts_of(store, rank) for rank in absent if store.check([f"facts/{rank}"])}
        everyone |= came
        if not differ and differences({0: facts, **came}):
            differ = True
            world_size = max(int(theirs["WORLD_SIZE"]) for theirs in everyone.values())
            deadline = time.monotonic() + OTHERS_S
        if time.monotonic() > deadline:
            if differ:
                break
            here = [store.get(f"process/{rank}").decode().rpartition(" on ")[2] for rank in everyone]
            raise dist.DistStoreError(
                f"ranks {absent} did not come, {len(everyone)} of {world_size} did, from {', '.join(dict.fromkeys(here))}: start "
                "the others, and check that their hosts can reach this one"
            )
        if not came:
            time.sleep(STORE_POLL_S)
    return everyone, describe(everyone)


def _require_one_process(store: Store, rank: int) -> None:
    """:raises UsageError: when another process has this rank"""
    me = f"process {os.getpid()} on {socket.gethostname()}"
    first = store.compare_set(f"process/{rank}", "", me).decode()
    if first != me:
        conflict = f"RANK={rank} was given to two processes, {first} and {me}: give each rank to one"
        store.set("conflict", conflict)
        raise UsageError(conflict)


def _ranks_by_value(everyone: Mapping[int, Facts], name: str, absent: str = UNKNOWN) -> dict[str, list[int]]:
    """The ranks with each value of a fact, but for those that cannot tell it."""
    ranks_with: dict[str, list[int]] = {}
    for rank, facts in sorted(everyone.items()):
        if facts.get(name, absent) != UNKNOWN:
            ranks_with.setdefault(facts.get(name, absent), []).append(rank)
    return ranks_with


def _facts_of(store: Store, rank: int) -> Facts:
    facts: Facts = json.loads(store.get(f"facts/{rank}"))
    return facts


def wait_for(keys: list[str], store: Store, deadline: float) -> list[str]:
    """Wait until the store has these keys; returns those that it does not have by then."""
    while keys := [key for key in keys if not store.check([key])]:
        if time.monotonic() > deadline:
            return keys
        time.sleep(STORE_POLL_S)
    return []


def _listed(ranks: list[int]) -> str:
    """``rank 1``, ``ranks 0 and 2``, ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *shown, last = map(str, ranks)
    if len(ranks) > MOST_RANKS:
        shown, last = shown[:MOST_RANKS], f"{len(ranks) - MOST_RANKS} more"
    return f"ranks {', '.join(shown)} and {last}"
