"""The report of a conformance run: a table with a line for each check, a summary, and the same as JSON."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from common.benchmarking.turns import write_results
from ddp.conformance.check import Check
from ddp.conformance.runner import PASS, STATUSES, Result

RESULTS_FILE = "conformance.json"


def worst(results: Iterable[Result]) -> list[str]:
    """The status of each check, the worst over the numbers of ranks."""
    statuses: dict[str, str] = {}
    for result in results:
        statuses[result.check] = max(statuses.get(result.check, PASS), result.status, key=STATUSES.index)
    return list(statuses.values())


def summary(results: Iterable[Result]) -> str:
    """``107 of 112 pass: 3 not offered, 1 wrong, 1 hung``"""
    counts = Counter(worst(results))
    others = [f"{counts[status]} {status}" for status in STATUSES if status != PASS and counts[status]]
    line = f"{counts[PASS]} of {counts.total()} pass"
    return f"{line}: {', '.join(others)}" if others else line


def table(results: Sequence[Result], columns: int = 140) -> str:
    """One line for each check: its status at each number of ranks, its name, and why it does not pass.

    :param results: sorted by check
    :param columns: the width into which the lines must fit
    """
    numbers = sorted({result.ranks for result in results})
    heads = "".join(f"{f'{n} ranks':>13}" for n in numbers)
    lines = []
    for topic, of_topic in itertools.groupby(results, lambda result: result.topic):
        lines += ["", f"{heads}  {topic.upper().replace('_', ' ')}"]
        for check, of_check in itertools.groupby(of_topic, lambda result: result.check):
            by_number = {result.ranks: result for result in of_check}
            statuses = "".join(f"{by_number[n].status if n in by_number else '-':>13}" for n in numbers)
            line = f"{statuses}  {check}"
            messages = [result.message for result in by_number.values() if result.status != PASS]
            if messages:
                line += f": {messages[0]}"
            lines.append(line if len(line) <= columns else line[: columns - 3] + "...")
    return "\n".join(lines[1:])


def listing(checks: Sequence[Check]) -> str:
    """All checks by topic, each with what it proves."""
    lines = []
    for topic, of_topic in itertools.groupby(checks, lambda check: check.topic):
        lines += ["", topic]
        for check in of_topic:
            lines += [f"  {check.name}", *(f"      {line}" for line in check.proves.splitlines())]
    return "\n".join([*lines[1:], "", f"{len(checks)} checks"])


def write_json(folder: Path, config: object, results: Sequence[Result]) -> None:
    """Write all results, with the tracebacks of the ranks.

    :raises OSError: when it cannot be written
    """
    content = {"config": config, "summary": summary(results), "results": [asdict(result) for result in results]}
    write_results(folder / RESULTS_FILE, content)
