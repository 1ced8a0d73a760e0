"""common/resilience/suspicions.py: the ranks' reports lead to the rank that was lost first, and all ranks name the same one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from common.resilience import suspicions
from common.resilience.suspicions import RankLost, Suspicion, Suspicions

ELSEWHERE = ("another-host", 1)
LATE = TimeoutError("no answer")
CLOSED = RuntimeError("Connection closed by peer")


def in_one_process(patch: pytest.MonkeyPatch) -> None:
    """A new store for ranks that are all in this process; none of them waits for the others' reports."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    patch.setattr(suspicions, "GRACE_S", 0.0)


@pytest.fixture
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_process(monkeypatch)


def rank_of(*processes: tuple[str, int], rank: int, key: str = "job") -> Suspicions:
    return Suspicions(key, rank, list(processes), timeout_s=10.0)


def assert_lost(error: RankLost, rank: int) -> None:
    assert str(error).startswith(f"rank {rank} (")


@pytest.mark.usefixtures("_store")
def test_the_first_decision_is_that_of_all_ranks() -> None:
    ranks = [rank_of(*[ELSEWHERE] * 4, rank=rank) for rank in range(4)]
    first = ranks[1].report(0, LATE)
    assert str(first) == "rank 0 (pid 1 on another-host) did not answer within 10 s during an all-reduce"
    for rank, suspect in ((2, 1), (3, 2), (3, None)):
        assert str(ranks[rank].report(suspect, CLOSED)) == str(first)
    with pytest.raises(RankLost, match="rank 0"):
        ranks[2].raise_if_lost()
    ranks[0].raise_if_lost()  # it has not failed yet


@pytest.mark.usefixtures("_store")
def test_reports_of_other_groups_and_earlier_jobs_in_the_store_do_not_count() -> None:
    for key, lost in (("first", 0), ("second", 2)):
        assert_lost(rank_of(*[ELSEWHERE] * 3, rank=1, key=key).report(lost, CLOSED), lost)


@given(data=st.data())
def test_reports_lead_to_the_one_rank_that_makes_none(data: st.DataObject) -> None:
    """Each rank gives up on one that is nearer to the lost one: some report in time, the first of them among those."""
    size = data.draw(st.integers(2, 8))
    order = data.draw(st.permutations(range(size)))  # from the lost one outwards
    suspects = {order[i]: order[data.draw(st.integers(0, i - 1))] for i in range(1, size)}
    reporting = order[1 : 1 + data.draw(st.integers(1, size - 1))]
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        ranks = {rank: rank_of(*[ELSEWHERE] * size, rank=rank) for rank in reporting}
        for number, rank in enumerate(data.draw(st.permutations(reporting))):
            ranks[rank]._detector.report(Suspicion(number, suspects[rank], "was seen"))
        last = reporting[-1]
        assert_lost(ranks[last].report(suspects[last], CLOSED), order[0])


@pytest.mark.usefixtures("_store")
def test_of_reports_without_a_suspect_the_first_saw_the_cause() -> None:
    ranks = [rank_of(*[ELSEWHERE] * 3, rank=rank) for rank in range(3)]
    ranks[0]._detector.report(Suspicion(0, None, "did not answer within 10 s"))
    error = ranks[2].report(None, CLOSED)  # of rank 0's connection, which gave up
    assert str(error) == "rank 1 (pid 1 on another-host) did not answer within 10 s during an all-reduce"


@pytest.mark.usefixtures("_store")
def test_no_rank_is_named_when_all_live_and_report() -> None:
    pair = [rank_of(ELSEWHERE, ELSEWHERE, rank=rank) for rank in range(2)]
    pair[0]._detector.report(Suspicion(1, None, "was seen"))
    error = pair[1].report(None, RuntimeError("Invalid scalar type\nGLHF"))
    assert str(error) == "an all-reduce failed, and no rank is known to have caused it: Invalid scalar type"


@pytest.mark.usefixtures("_store")
def test_a_rank_whose_process_has_ended_is_named_before_a_suspect() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = socket.gethostname()
    processes = [(here, os.getpid()), (here, os.getpid()), (here, child.pid)]
    ranks = [rank_of(*processes, rank=0, key=key) for key in ("alive", "zombie", "gone")]
    assert_lost(ranks[0].report(1, CLOSED), 1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but its parent has not asked how
    zombie = ranks[1].report(1, CLOSED)
    child.communicate()
    gone = ranks[2].report(1, CLOSED)
    assert str(zombie) == str(gone) == f"rank 2 (pid {child.pid} on {here}) ended during an all-reduce"


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("silent", [True, False])
def test_without_a_store_the_suspect_is_named(monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    monkeypatch.setattr(suspicions, "STORE_S", 0.1)
    never = threading.Event()

    class Gone:
        def clone(self) -> Gone:
            return self

        def add(self, key: str, value: int) -> None:
            if silent:
                never.wait()
            raise dist.DistNetworkError("Broken pipe")

        set = check = compare_set = add

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Gone)
    assert_lost(rank_of(*[ELSEWHERE] * 4, rank=3).report(1, CLOSED), 1)
    never.set()
