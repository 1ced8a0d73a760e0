"""The lines of NCCL's watchdog and its desync report: who is behind, who is ahead, and whose calls differ.

The formats are those of torch's ProcessGroupNCCL.cpp and TraceUtils.h, from torch 1.10 on.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

ANY = "ProcessGroupNCCL|enqueued|WorkNCCL|lagging ranks|joined but didn't finish|finished collective #"
WORK = re.compile(
    r"Watchdog caught collective operation timeout:\s*"
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)"
    r"(?:, NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+))?, Timeout\(ms\)=(?P<timeout>\d+)\)"
)
STATUS = re.compile(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d+).*last completed (?:NCCL )?work: (?P<completed>-?\d+)",
    re.I,
)
STUCK = re.compile(r"watchdog got stuck for \d+ seconds")
GROUP, RANK = re.compile(r"\[PG (?:ID )?(\w+)"), re.compile(r"Rank (\d+)\]")
NEVER = re.compile(r"ranks \[(?P<ranks>[\d, ]+)\] are the lagging ranks that caused this timeout")
FINISHED = re.compile(r"\[(?P<ranks>[\d, ]+)\] finished collective #(?P<seq>\d+), but didn't join collective #")
ALIKE_ON_ALL_RANKS = ("ALLREDUCE", "BROADCAST", "REDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")


class Call(NamedTuple):
    """A collective in which a rank has waited for longer than the timeout."""

    number: int | None
    operation: str
    numel_in: str | None
    numel_out: str | None

    def __str__(self) -> str:
        number = "" if self.number is None else f" {self.number}"
        elements = f" (NumelIn={self.numel_in}, NumelOut={self.numel_out})" if self.numel_in else ""
        return f"{self.operation}{number}{elements}"


class Judgement(NamedTuple):
    """The reason for a hang.

    :ivar ranks: those who have caused it, as far as the log tells
    """

    ranks: tuple[int, ...]
    cause: str
    certain: bool


def listed(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


class Watchdogs:
    """All that the watchdogs of a job have said."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.groups: set[str] = set()
        self.status: dict[int, tuple[int, int]] = {}  # the numbers of the last call that was enqueued, and completed
        self.stuck: set[int] = set()
        self.never: set[int] = set()
        self.finished: dict[int, int] = {}  # by ranks that torch's report calls late, the last call that they completed
        self._begun, self._begun_by = "", None

    def feed(self, text: str, rank: int | None) -> None:
        """Take a line.

        :param rank: from its prefix, which counts all ranks; the watchdog's own number counts those of its group
        """
        if text.rstrip().endswith("operation timeout:"):  # the line was broken when it was copied
            self._begun, self._begun_by = text, rank
        elif text.startswith("WorkNCCL("):
            text, rank = self._begun + text, self._begun_by
        if found := NEVER.search(text):
            self.never |= _ranks(found)
        elif found := FINISHED.search(text):
            self.finished.update(dict.fromkeys(_ranks(found), int(found["seq"])))
        elif found := WORK.search(text) or STATUS.search(text) or STUCK.search(text):
            values = found.groupdict()
            numbered = RANK.search(text)
            who = rank if rank is not None else int(numbered[1]) if numbered else 0
            if values.get("op"):
                number = values["seq"] and int(values["seq"])
                self.calls.setdefault(who, Call(number, values["op"], values["numel_in"], values["numel_out"]))
            elif values.get("enqueued"):
                self.status.setdefault(who, (int(values["enqueued"]), int(values["completed"])))
                self.groups |= {*GROUP.findall(text)}
            else:
                self.stuck.add(who)

    def lines(self) -> list[str]:
        """Each call in which ranks waited, and how far the others are."""
        waiting = defaultdict(list)
        for rank, call in self.calls.items():
            waiting[call].append(rank)
        lines = [
            f"{listed(ranks)} waited in {call}" for call, ranks in sorted(waiting.items(), key=lambda item: item[1])
        ]
        return lines + [
            f"rank {rank} had enqueued {enqueued} and completed {completed}"
            for rank, (enqueued, completed) in sorted(self.status.items())
            if rank not in self.calls
        ]

    def judge(self, known: Collection[int]) -> Judgement | None:
        """The reason for the timeouts, if there were any.

        :param known: all ranks of the job that the log names
        """
        if self.never:
            return Judgement(tuple(sorted(self.never)), f"{listed(self.never)} never joined any collective", True)
        if self.finished:
            late, after = sorted(self.finished), min(self.finished.values())
            return Judgement(tuple(late), f"{listed(late)} did not join the collective after number {after}", True)
        if not self.calls:
            if not self.stuck:
                return None
            cause = f"the watchdog of {listed(self.stuck)} got no answer from CUDA or NCCL: a call there hangs, or a thread keeps the GIL"
            return Judgement(tuple(sorted(self.stuck)), cause, False)
        calls, one_group = self.calls, len(self.groups) < 2  # each group counts its own calls
        numbers = {rank: call.number for rank, call in calls.items() if call.number is not None}
        first = min(numbers.values(), default=0)
        late = {rank for rank, (enqueued, _) in self.status.items() if rank not in self.calls and enqueued < first}
        if late:
            return Judgement(
                tuple(sorted(late)),
                f"{listed(late)} never called collective {first}, in which {listed(calls)} waited",
                one_group,
            )
        behind = {rank for rank, number in numbers.items() if number == first}
        if len(behind) < len(numbers):
            ahead = numbers.keys() - behind
            cause = (
                f"{listed(behind)} is behind, in {calls[min(behind)]}; {listed(ahead)} went on to {calls[min(ahead)]}"
            )
            return Judgement(tuple(sorted(behind)), cause, False)
        odd = _odd_ones({rank: call.operation for rank, call in calls.items()})
        if odd:
            return Judgement(
                odd, f"the ranks call different collectives at the same place: {_each(calls, odd)}", one_group
            )
        odd = _odd_ones({rank: call[2:] for rank, call in calls.items() if call.operation in ALIKE_ON_ALL_RANKS})
        if odd:
            return Judgement(odd, f"the ranks pass tensors of different sizes: {_each(calls, odd)}", one_group)
        silent = set(known) - calls.keys() - self.status.keys()
        if silent:
            cause = f"{listed(silent)} printed nothing of it: {listed(calls)} waited for it in {calls[min(calls)]}"
            return Judgement(tuple(sorted(silent)), cause, False)
        cause = f"all ranks that the log has wait in the same {calls[min(calls)]}: another rank did not come, or the network hangs"
        return Judgement((), cause, False)


def _ranks(found: re.Match[str]) -> set[int]:
    return set(map(int, found["ranks"].split(",")))


def _odd_ones(values: dict[int, object]) -> tuple[int, ...]:
    """The ranks whose value is not the one that most have; all, if none is more frequent."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return ()
    usual = counts[0][0] if counts[0][1] > counts[1][1] else None
    return tuple(sorted(rank for rank, value in values.items() if value != usual))


def _each(calls: dict[int, Call], odd: Collection[int]) -> str:
    """The calls of the odd ranks, and of one of the others."""
    others = sorted(calls.keys() - set(odd))[:1]
    return "; ".join(f"rank {rank} {calls[rank]}" for rank in [*others, *list(odd)[:3]])
