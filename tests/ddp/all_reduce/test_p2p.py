"""ddp/all_reduce/p2p.py: messages reach the right rank, and all survivors name the rank that was lost first."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from common.distributed.process_group import process_group
from ddp.all_reduce import p2p as peers_module
from ddp.all_reduce.p2p import P2P, RankLost, _Report, _Witness
from tests.launch import free_port, run_ranks, run_with_victim

ELSEWHERE = ("another-host", 1)
LATE = TimeoutError("no answer")
CLOSED = RuntimeError("Connection closed by peer")


def talk() -> tuple[list[str], float, list[list[float]]]:
    """What each rank received from the one before it: everywhere, among three, and empty."""
    with process_group(timeout_s=50) as env:
        everybody = P2P()
        received = []
        three = everybody.among([3, 0, 2]) if env.rank != 1 else everybody.among([1])
        assert [3, 0, 2][three.rank] == env.rank if env.rank != 1 else three.rank == 0
        for p2p in (everybody, three):
            following, preceding = (p2p.rank + 1) % p2p.size, (p2p.rank - 1) % p2p.size
            incoming = torch.zeros(2)
            if p2p.size > 1:
                p2p.exchange(torch.full((2,), float(env.rank)), following, incoming, preceding)
                p2p.exchange(torch.empty(0), following, torch.empty(0), preceding)
            received.append(incoming.tolist())
        if env.rank == 0:
            everybody.send(torch.arange(6).view(2, 3), 3)
        elif env.rank == 3:
            whole = torch.zeros(2, 3, dtype=torch.int64)
            everybody.receive(whole, 0)
            assert whole.flatten().tolist() == list(range(6))
        return everybody.hosts, everybody.timeout_s, received


def test_messages_reach_the_rank_that_they_are_for() -> None:
    hosts, timeouts, received = zip(*run_ranks(talk, 4), strict=True)
    assert hosts == ([socket.gethostname()] * 4,) * 4
    assert timeouts == (50,) * 4
    assert [everywhere for everywhere, _ in received] == [[3, 3], [0, 0], [1, 1], [2, 2]]
    assert [among for _, among in received] == [[3, 3], [0, 0], [0, 0], [2, 2]]


def pass_on_until_lost(victim: int, hurt: Callable[[], None], store_port: int | None) -> tuple[object, str]:
    """A ring of messages, which the victim leaves; whom this rank names."""
    if store_port is not None:  # rank 0 holds the store, as without torchrun's agent
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(store_port)
    with process_group(timeout_s=60) as env:
        p2p = P2P()
        token = torch.zeros(1)
        try:
            for step in range(1_000_000):
                if env.rank == victim and step == 10:
                    hurt()
                p2p.exchange(token.clone(), (p2p.rank + 1) % p2p.size, token, (p2p.rank - 1) % p2p.size)
        except RankLost as lost:
            return lost.rank, str(lost)
        raise AssertionError("nobody was lost")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang_up() -> None:
    """Close all connections, as a host does that goes down; but this process does not end."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:  # if it is a socket
            if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername():  # and connected
                line.shutdown(socket.SHUT_RDWR)
    time.sleep(60)


def test_a_rank_whose_connections_close_is_named_also_by_those_who_had_none_to_it() -> None:
    survivors = run_with_victim(pass_on_until_lost, 4, 0, hang_up, None)
    for rank, message in survivors.values():
        assert rank == 0
        assert "rank 0 (pid " in message
        assert message.endswith(f" on {socket.gethostname()}) closed its connection during an all-reduce")


def test_a_lost_rank_that_held_the_store_is_named_by_all() -> None:
    survivors = run_with_victim(pass_on_until_lost, 4, 0, die, free_port())
    assert [rank for rank, _ in survivors.values()] == [0, 0, 0]


def in_one_process(patch: pytest.MonkeyPatch) -> None:
    """A new store for ranks that are all in this process; none of them waits for the others' reports."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    patch.setattr(peers_module, "GRACE_S", 0.0)


@pytest.fixture
def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_process(monkeypatch)


def witness(*processes: tuple[str, int], token: int = 0) -> _Witness:
    return _Witness(list(processes), token, timeout_s=10.0)


@pytest.mark.usefixtures("_store")
def test_the_first_verdict_is_everybodys() -> None:
    ranks = [witness(*[ELSEWHERE] * 4) for _ in range(4)]
    first = ranks[1].testify(by=1, against=0, cause=LATE)
    assert str(first) == "rank 0 (pid 1 on another-host) did not answer within 10 s during an all-reduce"
    for by, against in ((2, 1), (3, 2), (3, None)):
        later = ranks[by].testify(by, against, CLOSED)
        assert (later.rank, str(later)) == (first.rank, str(first))
    with pytest.raises(RankLost, match="rank 0") as repeated:
        ranks[2].repeat()
    assert repeated.value.rank == 0
    ranks[0].repeat()  # it has heard of nothing


@pytest.mark.usefixtures("_store")
def test_other_groups_and_earlier_jobs_on_the_same_store_are_not_heard() -> None:
    assert witness(*[ELSEWHERE] * 3, token=1).testify(by=1, against=0, cause=CLOSED).rank == 0
    assert witness(*[ELSEWHERE] * 3, token=2).testify(by=1, against=2, cause=CLOSED).rank == 2


@given(data=st.data())
def test_reports_lead_to_the_one_rank_that_makes_none(data: st.DataObject) -> None:
    """Each rank gives up on one that is nearer to the lost one: some report in time, the first of them among those."""
    size = data.draw(st.integers(2, 8))
    order = data.draw(st.permutations(range(size)))  # from the lost one outwards
    against = {order[i]: order[data.draw(st.integers(0, i - 1))] for i in range(1, size)}
    reporting = order[1 : 1 + data.draw(st.integers(1, size - 1))]
    with pytest.MonkeyPatch.context() as patch:
        in_one_process(patch)
        ranks = {rank: witness(*[ELSEWHERE] * size) for rank in reporting}
        for rank in data.draw(st.permutations(reporting)):
            ranks[rank]._journal.append(_Report(rank, against[rank], "was seen"))
        teller = reporting[-1]
        assert ranks[teller].testify(teller, against[teller], CLOSED).rank == order[0]


@pytest.mark.usefixtures("_store")
def test_nobody_is_named_when_all_live_and_complain() -> None:
    pair = [witness(ELSEWHERE, ELSEWHERE) for _ in range(2)]
    pair[0]._journal.append(_Report(0, None, "was seen"))
    error = pair[1].testify(1, None, RuntimeError("Invalid scalar type\nGLHF"))
    assert error.rank is None
    assert str(error) == "an all-reduce failed, and no rank is known to have caused it: Invalid scalar type"


@pytest.mark.usefixtures("_store")
def test_a_rank_whose_process_has_ended_is_named_before_a_suspect() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here = socket.gethostname()
    ranks = [witness((here, os.getpid()), (here, os.getpid()), (here, child.pid), token=token) for token in (1, 2, 3)]
    assert ranks[0].testify(by=0, against=1, cause=CLOSED).rank == 1
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but its parent has not asked how
    zombie = ranks[1].testify(by=0, against=1, cause=CLOSED)
    child.communicate()
    gone = ranks[2].testify(by=0, against=1, cause=CLOSED)
    assert zombie.rank == gone.rank == 2
    assert str(zombie) == str(gone) == f"rank 2 (pid {child.pid} on {here}) ended during an all-reduce"


@pytest.mark.usefixtures("_store")
def test_a_host_name_with_other_processes_is_not_believed() -> None:
    """Two containers may have one name; a pid of the other one means nothing here."""
    here = socket.gethostname()
    unknown = max(psutil.pids()) + 100_000
    assert witness((here, os.getpid()), (here, unknown), (here, unknown)).testify(0, 1, CLOSED).rank == 1


@pytest.mark.usefixtures("_store")
@pytest.mark.parametrize("silent", [True, False])
def test_without_a_store_the_suspect_is_named(monkeypatch: pytest.MonkeyPatch, silent: bool) -> None:
    monkeypatch.setattr(peers_module, "STORE_S", 0.1)
    never = threading.Event()

    class Gone:
        def clone(self) -> Gone:
            return self

        def append(self, key: str, value: str) -> None:
            if silent:
                never.wait()
            raise dist.DistNetworkError("Broken pipe")

        get = append

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Gone)
    started = time.monotonic()
    assert witness(*[ELSEWHERE] * 4).testify(by=3, against=1, cause=CLOSED).rank == 1
    assert time.monotonic() - started < 60  # the store was not waited for
    never.set()


def test_a_lost_rank_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RankLost("rank 3 ended", 3)))
    assert (error.rank, str(error)) == (3, "rank 3 ended")
