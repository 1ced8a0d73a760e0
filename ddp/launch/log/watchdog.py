"""The lines of NCCL's watchdog and its desync report: who is behind, who is ahead, and whose calls differ.

The formats are those of torch's ProcessGroupNCCL.cpp and TraceUtils.h, from torch 1.10 on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ddp.launch.ranks import listed

WORK = re.compile(
    r"Watchdog caught collective operation timeout:\s*WorkNCCL\((?:SeqNum=(?P<number>\d+), )?OpType=(?P<operation>\w+)"
    r"(?:, (?P<sizes>NumelIn=\d+, NumelOut=\d+))?, Timeout"
)
STATUS = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+).*last completed (?:NCCL )?work: (?P<completed>-?\d+)", re.I
)
DOWN = re.compile(r"taking the entire process down|Some NCCL operations have failed")
STUCK = re.compile(r"watchdog got stuck for \d+ seconds")
GROUP, RANK = re.compile(r"\[PG (?:ID )?(\w+)"), re.compile(r"Rank (\d+)\]")
LATE = re.compile(r"\[(?P<ranks>[\d, ]+)\] (?:are the lagging ranks|finished collective #)")  # torch's own report
SAME_SIZE_ON_ALL_RANKS = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")
SAME_OUTPUT_ON_ALL_RANKS = ("ALLGATHER", "COALESCED")  # as a rule


class Call(NamedTuple):
    """A collective in which a rank has waited for longer than the timeout."""

    number: int
    operation: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.operation} {self.number}" + f" ({self.sizes})" * bool(self.sizes)


class Judgement(NamedTuple):
    """The reason for a hang, and the ranks that have caused it, as far as the log tells."""

    ranks: Collection[int]
    cause: str
    certain: bool


class Watchdogs:
    """All that the watchdogs of a job have said.

    :ivar calls: by rank, the call in which it waited
    :ivar status: by rank, the numbers of the last call that was enqueued, and of the last that was completed
    :ivar stuck: ranks whose watchdog itself has hung
    :ivar down: ranks that ended since they had waited
    :ivar late: ranks that torch's own report calls so
    """

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.status: dict[int, tuple[int, int]] = {}
        self.stuck: set[int] = set()
        self.down: set[int] = set()
        self.late: set[int] = set()
        self._groups: set[str] = set()
        self._cut: tuple[str, int | None] = "", None

    def feed(self, text: str, rank: int | None) -> None:
        """Take a line.

        :param rank: from its prefix, which counts all ranks; the watchdog's own number counts those of its group
        """
        if text.endswith(("timeout:", "timeout: ")):  # the line was cut when it was copied
            self._cut = text, rank
        elif text.startswith("WorkNCCL("):
            text, rank = self._cut[0] + text, self._cut[1]
        if late := LATE.search(text):
            self.late |= set(map(int, late["ranks"].split(",")))
        numbered = RANK.search(text)
        who = rank if rank is not None else int(numbered[1]) if numbered else 0
        if call := WORK.search(text):
            self.calls.setdefault(who, Call(int(call["number"] or 0), call["operation"], call["sizes"] or ""))
        elif status := STATUS.search(text):
            self.status.setdefault(who, (int(status["enqueued"]), int(status["completed"])))
            self._groups |= {*GROUP.findall(text)}
        elif DOWN.search(text):
            self.down.add(who)
        elif STUCK.search(text):
            self.stuck.add(who)

    def lines(self) -> list[str]:
        """The call of each rank that waited, and how far the others are."""
        waited = [f"rank {rank} waited in {call}" for rank, call in sorted(self.calls.items())]
        others = [(rank, *self.status[rank]) for rank in sorted(self.status.keys() - self.calls)]
        return waited + [f"rank {rank} had enqueued {last} and completed {done}" for rank, last, done in others]

    def judge(self, known: Collection[int]) -> Judgement | None:
        """The reason for the timeouts, if there were any.

        :param known: all ranks of the job that the log names
        """
        calls = self.calls
        if self.late:
            return Judgement(
                self.late, f"{listed(self.late)} did not join the next collective, says torch's report", True
            )
        if not calls:
            cause = f"the watchdog of {listed(self.stuck)} got no answer from CUDA or NCCL: a call there hangs, or a thread keeps the GIL"
            return Judgement(self.stuck, cause, False) if self.stuck else None
        one_group = len(self._groups) < 2  # each process group counts its own calls
        first = min(calls.values())
        behind = {rank for rank, (enqueued, _) in self.status.items() if rank not in calls and enqueued < first.number}
        if behind:
            return Judgement(
                behind,
                f"{listed(behind)} never called collective {first.number}, in which {listed(calls)} waited",
                one_group,
            )
        behind = {rank for rank, call in calls.items() if call.number == first.number}
        if ahead := calls.keys() - behind:
            cause = f"{listed(behind)} is behind, in {first}; {listed(ahead)} went on to {calls[min(ahead)]}"
            return Judgement(behind, cause, False)
        if odd := _odd_ones({rank: call.operation for rank, call in calls.items()}):
            return Judgement(
                odd, f"the ranks call different collectives at the same place: {self._each(odd)}", one_group
            )
        sizes = {rank: call.sizes for rank, call in calls.items() if call.operation in SAME_SIZE_ON_ALL_RANKS}
        outputs = {
            rank: call.sizes.partition(", ")[2]
            for rank, call in calls.items()
            if call.operation in SAME_OUTPUT_ON_ALL_RANKS
        }
        if odd := _odd_ones(sizes or outputs):
            cause = f"the ranks pass tensors of different sizes: {self._each(odd)}"
            return Judgement(odd, cause, one_group and bool(sizes))
        if silent := {*known} - calls.keys() - self.status.keys() - self.down:
            return Judgement(
                silent, f"{listed(silent)} printed nothing of it: {listed(calls)} waited in {first}", False
            )
        return Judgement(
            (),
            f"all ranks that the log has wait in the same {first}: another rank did not come, or the network hangs",
            False,
        )

    def _each(self, odd: Collection[int]) -> str:
        """The calls of the odd ranks, and of one of the others."""
        others = sorted(self.calls.keys() - odd)
        return "; ".join(f"rank {rank} {self.calls[rank]}" for rank in [*others[:1], *sorted(odd)[:3]])


def _odd_ones(values: Mapping[int, str]) -> set[int]:
    """The ranks whose value is not the one that most have; all, if none is more frequent."""
    (usual, most), (_, next_most), *_others = [*Counter(values.values()).most_common(), ("", 0), ("", 0)]
    if most == next_most:
        return {*values}
    return {rank for rank, value in values.items() if value != usual}
