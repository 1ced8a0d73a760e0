"""What the checks have found: which passed, their numbers, what is slow and why. As JSON and as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.files.atomic_files import write_bytes, write_json
from ddp.gpu_check.runner import FAILED, HUNG, LEFT_OUT, NO_TIME, PASSED, Outcome

SUMMARY, TEXT = "summary.json", "summary.txt"
STATUSES = (PASSED, FAILED, HUNG, NO_TIME, LEFT_OUT)


@dataclass(frozen=True)
class Entry:
    """A check that is over, or was left out.

    :param found: its numbers, see ddp/gpu_check/results.py
    """

    name: str
    shows: str
    command: str
    outcome: Outcome
    found: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """A number that should not be so.

    :param name: a regular expression for all of the number's name
    :param is_slow: tells that from the number, or from a spread, [median, lower quartile, upper quartile]
    :param cause: the likely one, and what to do
    """

    name: str
    is_slow: Callable[[Any], bool]
    cause: str


RULES = (
    Rule("data_wait", lambda share: share > 0.1, "the ranks wait for batches: more --workers, or a faster disk"),
    Rule("gpu_busy", lambda share: share < 0.8, "the GPU waits for the host, or for batches"),
    Rule(
        "idle behind a synchronization",
        lambda share: share > 0.05,
        "the host waits for the GPU, and has nothing queued for it when the wait is over",
    ),
    Rule("trainer / .*", lambda ratio: ratio[1] > 1.05, "the host does not keep ahead of the device, or batches are late"),
    Rule("guarded / plain", lambda ratio: ratio[1] > 1.03, "safety.json has the cost of each guard"),
    Rule("by hand / torch, .*", lambda ratio: ratio[1] > 1.03, "Python's hooks take longer than the kernels that hide them"),
    Rule("DDP, .* efficiency", lambda share: share[2] < 0.8, "strategies.json divides what is lost into its causes"),
    Rule("page-locked / ordinary", lambda ratio: ratio < 1.1, "the link to the GPU is slow, or memory is pinned in name only"),
)  # fmt: skip


def write_summary(
    folder: Path, machine: Mapping[str, object], entries: Sequence[Entry], remaining: Sequence[str] = ()
) -> str:
    """Write both files, and return the text.

    :param machine: what the results are of, see common/machine.py
    :param remaining: the names of checks that are still to come
    """
    slow = explain(entries)
    content = {"checks": [asdict(entry) for entry in entries], "remaining": list(remaining), "slow": slow}
    write_json(folder / SUMMARY, {"machine": machine, **content})
    found = [
        f"{entry.name}: {', '.join(f'{name} {_shown(value)}' for name, value in entry.found.items())}"
        for entry in entries
        if entry.found
    ]
    text = "\n".join([*_table(entries), *_section("found", found), *_section("slow", slow)])
    write_bytes(folder / TEXT, f"{text}\n".encode())
    return text


def _table(entries: Sequence[Entry]) -> list[str]:
    """A line for each check, and the command to repeat one that did not pass."""
    counts = [(sum(entry.outcome.status == status for entry in entries), status) for status in STATUSES]
    lines = [", ".join(f"{count} {status}" for count, status in counts if count)]
    for entry in entries:
        outcome = entry.outcome
        seconds = f"{outcome.seconds:.0f} s" if outcome.seconds else ""
        reason = f": {outcome.reason}" if outcome.reason else ""
        lines.append(f"{outcome.status:>8} {seconds:>6}  {entry.name:<18}  {entry.shows}{reason}")
        if outcome.status in (FAILED, HUNG):
            lines.append(f"{'again':>15}:  {entry.command}")
    return lines


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def explain(entries: Sequence[Entry]) -> list[str]:
    """What is slower than it should be, each with its likely cause."""
    return [
        f"{entry.name}: {name} is {_shown(value)}: {rule.cause}"
        for entry in entries
        for name, value in entry.found.items()
        for rule in RULES
        if re.fullmatch(rule.name, name) and rule.is_slow(value)
    ]


def _shown(value: float | Sequence[float]) -> str:
    """A number, or a spread as its median and quartiles."""
    if isinstance(value, Sequence):
        median, low, high = value
        return f"{median:.3f} [{low:.3f} to {high:.3f}]"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
