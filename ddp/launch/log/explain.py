"""``doctor --explain``: a log, or the text of a message.

    python -m ddp.launch.doctor --explain train.log
    python -m ddp.launch.doctor --explain logs/                 # of torchrun --log-dir, or one file per rank
    kubectl logs job/train | python -m ddp.launch.doctor --explain -
    python -m ddp.launch.doctor --explain "MESSAGE"

It finds the failure that came first; see ddp/launch/log/judge.py. Exit status 1 says that there is none.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from common.command_line.cli import command
from common.errors import UsageError
from ddp.launch import symptoms
from ddp.launch.log.evidence import Evidence, gathered
from ddp.launch.log.judge import consequences, judge
from ddp.launch.log.lines import STANDARD_INPUT
from ddp.launch.log.verdict import Verdict
from ddp.launch.ranks import listed

MOST_LINES = 8  # of a kind


@command
def main() -> None:
    """Explain a log if the arguments are paths, or a message."""
    paths = [argument.removeprefix("--explain=") for argument in sys.argv[1:] if argument != "--explain"]
    missing = [path for path in paths if path != str(STANDARD_INPUT) and not os.path.exists(path)]
    if paths and not missing:
        explain_log([Path(path) for path in paths])
    elif files := [path for path in missing if re.fullmatch(r"\S+(?:\.(?:log|out|err|txt)|/)", path)]:
        raise UsageError(f"--explain {files[0]}: there is no such file")
    else:
        symptoms.main()


def explain_log(paths: list[Path]) -> None:
    evidence = gathered(paths)
    verdict = judge(evidence)
    print(report(evidence, verdict))
    sys.exit(0 if verdict else 1)


def report(evidence: Evidence, verdict: Verdict | None) -> str:
    """The verdict as it is printed."""
    read = f"read {evidence.lines:,} lines of {evidence.files} file{'s' * (evidence.files != 1)}"
    read += f", {listed(evidence.ranks)}" * bool(evidence.ranks)
    if verdict is None:
        return f"{read}: no error, exit code or watchdog's line of a training job is in it"
    lines = [read, f"first failure{'' if verdict.certain else ', most likely'}: {verdict}"]
    lines += [f"    at {verdict.place}"] * (verdict.place is not None)
    for title, said in (
        ("", verdict.notes),
        ("only consequences:", consequences(evidence)),
        ("to know more:", verdict.advice),
    ):
        lines += [title] * bool(title and said) + [f"    {line}" for line in _cut(said)]
    if entries := symptoms.matches(verdict.message or verdict.cause)[:1]:
        lines += ["symptoms.md has this of it:", "", symptoms.readable(entries[0])]
    return "\n".join(lines)


def _cut(lines: Iterable[str]) -> list[str]:
    every = list(dict.fromkeys(lines))
    return every[:MOST_LINES] + [f"and {len(every) - MOST_LINES} more"] * (len(every) > MOST_LINES)
