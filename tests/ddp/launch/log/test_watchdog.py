"""Logs of NCCL's watchdog: who is behind, ahead, silent, or calls something else.

The lines are made after torch's own format strings, which print their place in ProcessGroupNCCL.cpp: line 616 is in ``checkTimeout``, 1785
and 2271 in the watchdog's loop, 1746 in ``HeartbeatMonitor::runLoop``, all of torch 2.5 to 2.8; line 737 is of torch 1.12. The report is that
of torch/csrc/distributed/c10d/TraceUtils.h, lines 77 to 116. The strings are in libtorch_cuda.so of torch 2.14.1, too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp.launch.log.evidence import gathered
from ddp.launch.log.judge import judge


def timeout(rank: int, number: int = 412, operation: str = "ALLREDUCE", numel: int = 10, place: int = 616) -> str:
    """ProcessGroupNCCL.cpp, ``WorkNCCL::checkTimeout`` and ``operator<<``."""
    return (
        f"[rank{rank}]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:{place}] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType={operation}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) ran for 600020 milliseconds "
        "before timing out.\n"
    )


def failed(rank: int, number: int = 412, enqueued: int = 414, group: str = "ID 0 PG GUID 0(default_pg)") -> str:
    """ProcessGroupNCCL.cpp, the watchdog's loop."""
    return (
        f"[rank{rank}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:2271] [PG {group} Rank {rank}]  failure detected by watchdog at work sequence "
        f"id: {number} PG status: last enqueued work: {enqueued}, last completed work: {number - 1}\n"
    )


def dumps(rank: int, enqueued: int, told_by: int = 0) -> str:
    """ProcessGroupNCCL.cpp, ``getNCCLWatchdogTimeoutErrorMsg``."""
    return (
        f"[rank{rank}]:[E626 06:24:45.2 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal due to "
        f"a collective timeout from  rank {told_by} and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, "
        f"last completed NCCL work: {enqueued}.This is most likely caused by incorrect usages of collectives\n"
    )


def down(rank: int) -> str:
    """ProcessGroupNCCL.cpp, ``WorkNCCL::handleException``, and libstdc++."""
    return (
        f"[rank{rank}]:[E626 06:24:46 ProcessGroupNCCL.cpp:630] [Rank {rank}] Some NCCL operations have failed or timed out. Due to "
        "the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        f"[rank{rank}]:[E626 06:24:46 ProcessGroupNCCL.cpp:636] [Rank {rank}] To avoid data inconsistency, we are taking the entire "
        "process down.\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
        f"  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: [Rank {rank}] "
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum=412, OpType=ALLREDUCE, NumelIn=10, NumelOut=10, Timeout(ms)=600000) "
        "ran for 600020 milliseconds before timing out.\n"
    )


def raised(rank: int, error: str) -> str:
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 88, in step',
        "    loss.backward()",
        error,
    )
    return "".join(f"[rank{rank}]: {line}\n" for line in lines)


def ended(*codes: tuple[int, int]) -> str:
    """torch/distributed/elastic/multiprocessing/errors/__init__.py, the first code as the root cause."""
    parts = [
        f"[{rank}]:\n  time      : 2026-06-26_06:24:48\n  host      : node1\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {1000 + rank})\n  error_file: <N/A>\n  traceback : Signal {-code} received by PID {1000 + rank}\n"
        for rank, code in codes
    ]
    return (
        "=====\ntrain.py FAILED\n-----\nFailures:\n"
        + "".join(parts[1:])
        + "-----\nRoot Cause (first observed failure):\n"
        + parts[0]
        + "=====\n"
    )


OLD = (
    "[E ProcessGroupNCCL.cpp:737] [Rank {}] Watchdog caught collective operation timeout: WorkNCCL({}OpType={}, Timeout(ms)=1800000) "
    "ran for 1802212 milliseconds before timing out.\n"
)
REPORT = (
    "[rank0]:[E626 06:24:45.0 ProcessGroupNCCL.cpp:600] [Rank 0] \n\t - [0] Timeout at collective: ALLREDUCE, #412\n"
)
NEVER = "\t - To our best knowledge, ranks [3] are the lagging ranks that caused this timeout. They never joined any collectives\n"
LATE = (
    "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:\n"
    "\t   - [0] joined but didn't finish collective #412 (count from 1)\n"
    "\t     [1, 2] finished collective #411, but didn't join collective #412 (count from 1)\n"
)
THREE = timeout(0) + failed(0) + timeout(1) + failed(1) + timeout(3) + failed(3)
FOUR = "".join(timeout(rank) + failed(rank) for rank in range(4))
READY = "".join(f"[rank{rank}]: ready\n" for rank in range(4))

# The log, the ranks to blame, whether that is certain, and words of the cause.
LOGS = {
    "one rank is behind": (THREE + dumps(2, 411), (2,), True, "rank 2 never called collective 412"),
    "rank 0 does something alone": (
        timeout(1) + timeout(2) + dumps(0, 400, 1),
        (0,),
        True,
        "rank 0 never called collective 412",
    ),
    "two ranks are behind": (
        timeout(0) + dumps(2, 411) + timeout(1) + dumps(3, 409),
        (2, 3),
        True,
        "ranks 2, 3 never called",
    ),
    "one rank calls another collective": (
        timeout(0) + timeout(1) + timeout(2, operation="BROADCAST") + timeout(3),
        (2,),
        True,
        "rank 2 BROADCAST 412",
    ),
    "two ranks, two collectives": (
        timeout(0) + timeout(1, operation="_ALLGATHER_BASE"),
        (0, 1),
        True,
        "different collectives",
    ),
    "one rank has another size": (
        timeout(0) + timeout(1) + timeout(2, numel=12) + timeout(3),
        (2,),
        True,
        "rank 2 ALLREDUCE 412 (NumelIn=12",
    ),
    "two ranks, two sizes": (
        timeout(0, operation="BROADCAST") + timeout(1, operation="BROADCAST", numel=3),
        (0, 1),
        True,
        "sizes",
    ),
    "all-to-all may have other sizes": (
        timeout(0, operation="ALLTOALL_BASE") + timeout(1, operation="ALLTOALL_BASE", numel=3),
        (),
        False,
        "the same",
    ),
    "all-gathers that give other sizes": (
        timeout(0, operation="COALESCED") + timeout(1, operation="COALESCED", numel=3),
        (0, 1),
        False,
        "sizes",
    ),
    "rank 0 is not in the log": (
        timeout(1) + failed(2) + down(3).splitlines(keepends=True)[1],
        (0,),
        False,
        "rank 0 printed nothing of it",
    ),
    "an error of CUDA": (
        down(3).replace("[Rank 3] Watchdog caught", "CUDA error: an illegal memory access was encountered\n"),
        (3,),
        True,
        "C++ exception",
    ),
    "all ranks in the same call": (FOUR, (), False, "wait in the same ALLREDUCE 412"),
    "one rank is a call behind": (
        timeout(0) + timeout(1, 411) + timeout(2),
        (1,),
        False,
        "rank 1 is behind, in ALLREDUCE 411",
    ),
    "one rank is silent": (READY + timeout(0) + timeout(1) + timeout(2), (3,), False, "rank 3 printed nothing of it"),
    "the report: never joined": (THREE + REPORT + NEVER, (3,), True, "rank 3 did not join the next collective"),
    "the report: late": (
        timeout(0) + REPORT + LATE,
        (1, 2),
        True,
        "ranks 1, 2 did not join the next collective",
    ),
    "torch 1.12": (
        OLD.format(0, "SeqNum=9, ", "ALLREDUCE") + OLD.format(1, "SeqNum=7, ", "ALLREDUCE"),
        (1,),
        False,
        "rank 1 is behind",
    ),
    "torch 1.9": (
        OLD.format(0, "", "ALLREDUCE") + OLD.format(1, "", "BROADCAST"),
        (0, 1),
        True,
        "different collectives",
    ),
    "after an exception": (
        raised(2, "ValueError: bad batch") + THREE + down(0) + ended((0, -6), (1, -6)),
        (2,),
        True,
        "ValueError: bad batch",
    ),
    "after CUDA ran out of memory": (
        READY
        + raised(3, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        + timeout(0)
        + timeout(1)
        + timeout(2)
        + down(1),
        (3,),
        True,
        "CUDA out of memory",
    ),
    "after a kill": (timeout(0) + down(0) + ended((1, -9), (0, -6)), (1,), False, "exit code -9, SIGKILL"),
    "the aborts are consequences": (
        FOUR + down(0) + down(1) + ended((0, -6), (1, -6), (2, -6)),
        (),
        False,
        "wait in the same ALLREDUCE",
    ),
    "a watchdog that is stuck": (
        "[rank1]:[F626 06:32:44.9 ProcessGroupNCCL.cpp:1500] [PG ID 0 PG GUID 0(default_pg) Rank 1] [PG ID 0 PG GUID 0(default_pg) Rank 1] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives. \n",
        (1,),
        False,
        "got no answer from CUDA or NCCL",
    ),
    "two groups": (
        timeout(0, 5) + failed(0, 5, 6) + timeout(1, 5, "BROADCAST") + failed(1, 5, 6, "ID 1 PG GUID 1(tp)"),
        (0, 1),
        False,
        "different collectives",
    ),
    "a line that was broken by copying": (
        (timeout(0) + timeout(1, 411)).replace("timeout: ", "timeout: \n"),
        (1,),
        False,
        "rank 1 is behind",
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_rank_to_blame(name: str, tmp_path: Path) -> None:
    log, ranks, certain, cause = LOGS[name]
    (tmp_path / "log").write_text(log)
    verdict = judge(gathered([tmp_path / "log"]))
    assert verdict is not None
    assert (verdict.ranks, verdict.certain) == (ranks, certain), verdict
    assert cause in verdict.cause
