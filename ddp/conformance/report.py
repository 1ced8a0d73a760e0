"""The table of a conformance run, its summary, and its JSON."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.files.run_directory import files_line
from common.reporting.benchmark import write_results
from ddp.conformance.check import Check
from ddp.conformance.runner import PASS, STATUSES, Result

RESULTS_FILE = "conformance.json"


def table(results: Sequence[Result], columns: int = 140) -> str:
    """One line for each check: its status at each number of ranks, its name, and why it does not pass.

    :param results: sorted by check
    :param columns: the width into which the lines must fit
    """
    numbers = sorted({result.ranks for result in results})
    heads = "".join(f"{f'{n} ranks':>9}" for n in numbers)
    lines = []
    for topic, of_topic in itertools.groupby(results, lambda result: result.topic):
        lines += ["", f"{heads}  {topic.upper().replace('_', ' ')}"]
        for check, of_check in itertools.groupby(of_topic, lambda result: result.check):
            by_number = {result.ranks: result for result in of_check}
            statuses = "".join(f"{by_number[n].status if n in by_number else '-':>9}" for n in numbers)
            message = next((r.message for r in by_number.values() if r.status != PASS), "")
            lines.append(_fitted(f"{statuses}  {check}" + f": {message}" * bool(message), columns))
    return "\n".join(lines[1:])


def summary(results: Sequence[Result]) -> str:
    """``107 of 112 pass: 3 wrong, 1 refused, 1 hung``. A check passes if it does at every number of ranks."""
    worst: dict[str, int] = {}
    for result in results:
        worst[result.check] = max(worst.get(result.check, 0), STATUSES.index(result.status))
    counts = Counter(STATUSES[status] for status in worst.values())
    others = ", ".join(f"{counts[status]} {status}" for status in STATUSES if status != PASS and counts[status])
    return f"{counts[PASS]} of {len(worst)} pass" + (f": {others}" if others else "")


def listing(checks: Sequence[Check]) -> str:
    """All checks by topic, each with what it proves."""
    lines = []
    for topic, of_topic in itertools.groupby(checks, lambda check: check.topic):
        lines += ["", topic]
        for check in of_topic:
            needs = f" (at least {check.at_least} ranks)" if check.at_least > 2 else ""
            lines += [f"  {check.name}{needs}", *(f"      {line}" for line in check.proves.splitlines())]
    return "\n".join([*lines[1:], "", f"{len(checks)} checks"])


def write_json(folder: Path, config: object, results: Sequence[Result]) -> None:
    """Write all results, with the tracebacks of the ranks.

    :raises OSError: when it cannot be written
    """
    content = {"config": config, "summary": summary(results), "results": [asdict(result) for result in results]}
    write_results(folder / RESULTS_FILE, content)


def files(folder: Path) -> str:
    """The last line of the summary."""
    return files_line(folder, (RESULTS_FILE, "rank*.log"))


def clear_logs(folder: Path) -> None:
    """Remove the logs of an earlier run."""
    for path in folder.glob("rank*-of-*.log"):
        path.unlink()


def _fitted(line: str, columns: int) -> str:
    return line if len(line) <= columns else line[: columns - 3] + "..."
