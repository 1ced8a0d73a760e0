"""The verdict on the dumps of several ranks: the first collective of a group that they called differently, or that some did not call.

Collectives are matched by their order alone. So the first one that differs tells more than the one in which the job hangs: from there on,
a rank that left one out answers every call of the others with its next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ddp.launch.dumps.recorded import Collective, Recorded
from ddp.launch.ranks import listed

Calls = Mapping[int, Collective]  # of one rank in one group, by number
DEFAULT_GROUP = "0"  # torch's name of the group of all ranks


class Finding(NamedTuple):
    group: str
    text: str
    blamed: list[int]
    waiting: list[int]  # ranks that only wait for the blamed ones


def findings(dumps: Mapping[int, Recorded]) -> list[Finding]:
    """A finding for each group in which something is wrong, the cause first and what only follows from it last."""
    names = dict.fromkeys(one.group for dump in dumps.values() for one in dump.collectives)
    found = [finding for name in names if (finding := _of_group(name, dumps))]

    def waits_elsewhere(finding: Finding) -> bool:
        """Whether a rank that is behind here waits in another group for one that is behind there."""
        pairs = itertools.product(finding.blamed, found)
        return any(rank in other.waiting and dumps[rank].collectives[-1].group == other.group for rank, other in pairs)

    return sorted(found, key=waits_elsewhere)


def _of_group(name: str, dumps: Mapping[int, Recorded]) -> Finding | None:
    ranks = {rank: calls for rank, dump in dumps.items() if (calls := dump.calls_of(name))}
    members = {rank for dump in dumps.values() for rank in dump.groups.get(name, ())}
    if name == DEFAULT_GROUP:
        members |= dumps.keys()
    absent = sorted(members & (dumps.keys() - ranks.keys()))
    for number in sorted({number for calls in ranks.values() for number in calls}):
        by_call: dict[object, list[int]] = {}
        for rank, calls in ranks.items():
            if number in calls:
                by_call.setdefault(calls[number].call, []).append(rank)
        if len(by_call) > 1:
            most, few = sorted(by_call.values(), key=len, reverse=True)[:2]
            return Finding(name, f"group {name}: {_mismatch(ranks, number, most, few)}", few, [])
    lowest = min(max(calls) for calls in ranks.values())
    # NCCL's calls return before they are done. Where all have called the one that hangs, no rank is behind.
    undone = [number for calls in ranks.values() for number, one in calls.items() if one.is_undone]
    behind = [] if absent else [rank for rank, calls in ranks.items() if max(calls) == lowest]
    ahead = [rank for rank in ranks if rank not in behind]
    if not ahead or (undone and min(undone) <= lowest and not absent):
        return None
    # A dump has only the latest calls.
    further = min(number for number in ranks[ahead[0]] if absent or number > lowest)
    parts = [f"{listed(ahead)} called {ranks[ahead[0]][further]}"]
    parts += [f"rank {rank} did not: its last there is {ranks[rank][lowest]}" for rank in behind]
    parts += [f"rank {rank} called none" for rank in absent]
    return Finding(name, f"group {name}: {'; '.join(parts)}{_left_out(ranks)}", behind + absent, ahead)


def _mismatch(ranks: Mapping[int, Calls], number: int, most: list[int], few: list[int]) -> str:
    """Words for ranks that called different collectives under the same number."""
    usual, strange = ranks[most[0]], ranks[few[0]]
    one, other = usual[number], strange[number]
    text = f"{listed(most)} called {one}; {listed(few)} called {other}"
    if one.name != other.name:
        return text + _explained(usual, strange, number, few, lambda call: call.call)
    if one.sizes != other.sizes:
        return f"{text}: with other shapes, {' '.join(one.sizes)} and {' '.join(other.sizes)}"
    return f"{text}: with other types, {one.dtypes[0]} and {other.dtypes[0]}"


def _left_out(ranks: Mapping[int, Calls]) -> str:
    """The cause where all calls are alike but for their lines: a rank left out one of many that look the same."""
    (_, usual), *others = ranks.items()
    for rank, strange in others:
        for number in sorted(usual.keys() & strange.keys()):
            if usual[number].frame != strange[number].frame:
                if text := _explained(usual, strange, number, [rank], lambda one: (one.call, one.frame)):
                    return text
                break
    return ""


def _explained(usual: Calls, strange: Calls, number: int, few: list[int], key: Callable[[Collective], object]) -> str:
    """How one of two sequences of calls became the other: one call more or less, or two that changed places."""

    def shifted(first: Calls, second: Calls) -> bool:
        """Whether the second goes on as the first does one call later."""
        pairs = [(first[at + 1], second[at]) for at in second if at >= number and at + 1 in first]
        return bool(pairs) and all(key(one) == key(other) for one, other in pairs)

    here, after = ([key(calls[at]) for at in (number, number + 1) if at in calls] for calls in (usual, strange))
    if len(here) == 2 and here == after[::-1]:
        return f": {listed(few)} called the two in another order"
    if shifted(usual, strange):
        return f": {listed(few)} skipped {usual[number]}"
    return f": {listed(few)} called it in addition" if shifted(strange, usual) else ""
