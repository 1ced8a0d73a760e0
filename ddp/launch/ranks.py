"""Ranks: of files, by their names; and in words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

MOST_RANKS = 4096  # larger numbers in names of files are of jobs
RANK_OF_NAME = re.compile(r".*rank[ _.-]?(\d+)", re.IGNORECASE)
RANK_OF_PATH = re.compile(r"(?:rank|task|proc|attempt_\d+/)[-_.]?(\d+)")


def ranks_of(files: Sequence[Path]) -> dict[Path, int | None]:
    """The rank of each file: the number after the last "rank" of its name; or else the number in which it differs from others."""
    alike = defaultdict(list)
    for file in files:
        alike[re.sub(r"\d+", "#", str(file))].append(file)
    ranks: dict[Path, int | None] = {}
    for group in alike.values():
        numbers = list(zip(*(map(int, re.findall(r"\d+", str(file))) for file in group), strict=True))
        differing = [column for column in numbers if len(set(column)) > 1 and max(column) < MOST_RANKS]
        for place, file in enumerate(group):
            named = RANK_OF_NAME.search(file.name) or (not differing and RANK_OF_PATH.search(file.as_posix()))
            ranks[file] = int(named[1]) if named else differing[-1][place] if differing else None
    return ranks


def listed(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 1, 2``, or ``ranks 0-7, 9``"""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("rank " if [len(run) for run in runs] == [1] else "ranks ") + ", ".join(words)
