"""A picture of conformance runs: every check of several wrappers, one mark each.

python -m ddp.conformance --output runs/torch
python -m ddp.conformance ddp.by_hand:DistributedDataParallel --output runs/ours
python -m ddp.conformance.figure --runs runs/torch,runs/ours --output conformance.png
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import command, option, parse
from common.errors import UsageError

# For each status, the color, the marker and the word in the legend.
MARKS = {
    "pass": ("#8fb8dc", "s", "pass"),
    "wrong": ("#c0271a", "X", "wrong"),
    "refused": ("#9aa3aa", "_", "refused"),
    "hung": ("#222222", "P", "hung"),
}
SEVERITY = list(MARKS)


@dataclass(frozen=True)
class FigureConfig:
    """Settings of ``ddp.conformance.figure``."""

    runs: tuple[str, ...] = option(
        ("runs/conformance",), "folders that ddp.conformance has written, or their JSON files, from left to right"
    )
    output: Path = option(Path("conformance.png"), "the picture")


@command
def main() -> None:
    config = parse(FigureConfig, "ddp.conformance.figure", __doc__, sys.argv[1:])
    paths = [Path(run) / "conformance.json" if Path(run).is_dir() else Path(run) for run in config.runs]
    plot(config.output, [read(path) for path in paths])
    print(config.output)


def read(path: Path) -> dict[str, Any]:
    """A run's JSON.

    :raises UsageError: if there is none
    """
    try:
        content = json.loads(path.read_text())
        assert content["results"] and content["config"]["wrapper"]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise UsageError(f"--runs: {path} is not of ddp.conformance ({type(error).__name__}): run it first") from None
    return dict(content)


def worst(results: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """For each topic, the checks with their worst status over the numbers of ranks."""
    found: dict[str, dict[str, str]] = {}
    for result in results:
        of_topic = found.setdefault(result["topic"], {})
        before = of_topic.get(result["check"], "pass")
        of_topic[result["check"]] = max(before, result["status"], key=SEVERITY.index)
    return found


def plot(path: Path, runs: list[dict[str, Any]]) -> None:
    """Draw one column for each run, one row for each topic, one mark for each check."""
    from common.reporting.run_figures import new_figure

    tables = [worst(run["results"]) for run in runs]
    topics = list(dict.fromkeys(itertools.chain(*tables)))
    figure, axes = new_figure(1, len(runs), (4.2 * len(runs) + 1.2, 0.3 * len(topics) + 1.3), "")
    for column, (plot_, run, table) in enumerate(zip(axes[0], runs, tables, strict=True)):
        for status, (color, marker, _) in MARKS.items():
            points = [
                (place, row)
                for row, topic in enumerate(topics)
                for place, found in enumerate(table.get(topic, {}).values())
                if found == status
            ]
            plot_.scatter(
                *zip(*points, strict=True) if points else ((), ()), c=color, marker=marker, s=42, linewidths=1.6
            )
        plot_.set_title(f"{run['config']['wrapper'].replace(':', chr(10))}\n{run['summary'].split(':')[0]}", fontsize=9)
        plot_.set_yticks(range(len(topics)), [topic.replace("_", " ") for topic in topics] if column == 0 else [])
        plot_.set_ylim(len(topics) - 0.5, -0.5)
        plot_.set_xlim(-0.8, max(len(checks) for table in tables for checks in table.values()) - 0.2)
        plot_.set_xticks([])
        plot_.tick_params(length=0)
        for side in plot_.spines.values():
            side.set_visible(False)
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="none", label=word, markersize=7, markeredgewidth=1.6)
        for color, marker, word in MARKS.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(MARKS), frameon=False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
