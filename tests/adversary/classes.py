"""The classes of attempts, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.adversary.attempt import Attempt, Verdict
from tests.adversary.attempts import files, flags, folders, images, launches, library, limits, output, signals

# By name: what is tried, and the attempts.
CLASSES: dict[str, tuple[str, list[Attempt]]] = {
    "flags": ("values that make no sense, of every command", flags.ATTEMPTS),
    "launches": ("ranks that disagree, environments that no launcher gives", launches.ATTEMPTS),
    "files": ("a run's files damaged, or forged with right digests", files.ATTEMPTS),
    "folders": ("what deletes and overwrites; other people's folders", folders.ATTEMPTS),
    "output": ("a stdout that is closed, full, or read by nobody", output.ATTEMPTS),
    "images": ("files that are no photos, or claim to be enormous", images.ATTEMPTS),
    "limits": ("machines that are too small", limits.ATTEMPTS),
    "library": ("the loader called as its documentation does not say", library.ATTEMPTS),
    "signals": ("stop signals, in every command", signals.ATTEMPTS),
}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The counts of each class by verdict, as Markdown."""
    lines = [["class", "attempts", *(verdict.value for verdict in Verdict), "slowest refusal", "most memory in one"]]
    for name, result in results.items():
        counts = [str(result["verdicts"][verdict.value]) for verdict in Verdict]
        seconds, megabytes = result["refusal_s"], result["refusal_mb"]
        limits = ["", ""] if seconds is None else [f"{seconds} s", f"{megabytes} MB"]
        lines.append([f"`{name}`: {CLASSES[name][0]}", str(result["attempts"]), *counts, *limits])
    sums = _sums(results)
    lines.append(["**all**", *(f"**{number}**" for number in (sum(sums), *sums)), "", ""])
    return _markdown(lines)


def totals(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The counts of all classes together, as Markdown."""
    sums = _sums(results)
    return _markdown(
        [["attempts", *(verdict.value for verdict in Verdict)], [str(number) for number in (sum(sums), *sums)]]
    )


def _sums(results: Mapping[str, Mapping[str, Any]]) -> list[int]:
    return [sum(result["verdicts"][verdict.value] for result in results.values()) for verdict in Verdict]


def _markdown(lines: list[list[str]]) -> str:
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
