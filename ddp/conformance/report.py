"""The results of conformance runs: the table of one with its summary and its JSON, and a picture of several wrappers."""

from __future__ import annotations

import csv
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from common.errors import UsageError
from common.reporting.turns import write_results
from ddp.conformance.check import Check
from ddp.conformance.runner import PASS, STATUSES, Result

RESULTS_FILE, TABLE_FILE, PICTURE_FILE = "conformance.json", "conformance.csv", "conformance.png"
# For each status, the color and the marker in the picture.
MARKS = {"pass": ("#8fb8dc", "s"), "wrong": ("#c0271a", "X"), "refused": ("#9aa3aa", "_"), "hung": ("#222222", "P")}

# A check's topic and name, and its status with each wrapper.
Row = dict[str, str]


def compare(runs: Sequence[str], output: Path) -> None:
    """Write the status of each check with each run's wrapper to ``conformance.csv``, and draw ``conformance.png`` from it.

    :param runs: folders that ``ddp.conformance`` has written, from left to right
    :raises OSError: when the files cannot be written
    :raises UsageError: for a folder without a run
    """
    rows = merged(runs)
    with (output / TABLE_FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, output / PICTURE_FILE)


def merged(runs: Sequence[str]) -> list[Row]:
    """One row per check of any run: ``topic``, ``check``, and the worst status over the numbers of ranks by wrapper.

    :raises UsageError: for a folder without a run
    """
    rows: dict[tuple[str, str], Row] = {}
    for run in runs:
        try:
            content = json.loads((Path(run) / RESULTS_FILE).read_text())
            results = [Result(**result) for result in content["results"]]
            wrapper = content["config"]["wrapper"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            kind = type(error).__name__
            raise UsageError(f"--compare: {run} is not of ddp.conformance ({kind}): run it first") from None
        for (topic, name), status in worst(results).items():
            rows.setdefault((topic, name), {"topic": topic, "check": name})[wrapper] = status
    return list(rows.values())


def worst(results: Iterable[Result]) -> dict[tuple[str, str], str]:
    """The worst status over the numbers of ranks, by topic and check."""
    statuses: dict[tuple[str, str], str] = {}
    for result in results:
        key = (result.topic, result.check)
        statuses[key] = max(statuses.get(key, PASS), result.status, key=STATUSES.index)
    return statuses


def summary(statuses: Iterable[str]) -> str:
    """``107 of 112 pass: 3 wrong, 1 refused, 1 hung``

    :param statuses: of the checks, each the worst over the numbers of ranks
    """
    counts = Counter(statuses)
    others = ", ".join(f"{counts[status]} {status}" for status in STATUSES if status != PASS and counts[status])
    return f"{counts[PASS]} of {counts.total()} pass" + (f": {others}" if others else "")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw one column for each wrapper, one line for each topic, one mark for each check."""
    from common.reporting.run_figures import new_figure

    wrappers = list(rows[0])[2:]
    topics = {topic: list(checks) for topic, checks in itertools.groupby(rows, lambda row: row["topic"])}
    figure, axes = new_figure(1, len(wrappers), 0.22 * len(topics) + 1.2, "")
    for plot, wrapper in zip(axes[0], wrappers, strict=True):
        for status, (color, marker) in MARKS.items():
            points = [
                (place, line)
                for line, checks in enumerate(topics.values())
                for place, row in enumerate(checks)
                if row[wrapper] == status
            ]
            places = zip(*points, strict=True) if points else ((), ())
            plot.scatter(*places, c=color, marker=marker, s=15, linewidths=1.2, label=status)
        counts = summary([row[wrapper] for row in rows]).partition(":")[0]
        plot.set_title(wrapper.replace(":", "\n") + f"\n{counts}", fontsize=8)
        plot.set_ylim(len(topics) - 0.5, -0.5)
        plot.set_xlim(-0.8, max(map(len, topics.values())) - 0.2)
        plot.set_axis_off()
    for line, topic in enumerate(topics):
        axes[0, 0].text(-1.2, line, topic.replace("_", " "), ha="right", va="center", fontsize=8)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(MARKS), fontsize=8, frameon=False
    )
    figure.savefig(path)


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
            line = f"{statuses}  {check}" + f": {message}" * bool(message)
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
    statuses = worst(results).values()
    content = {"config": config, "summary": summary(statuses), "results": [asdict(result) for result in results]}
    write_results(folder / RESULTS_FILE, content)
