"""Provoke the 71 failures, record their logs, and write the page that says what the doctor makes of them.

python -m tests.ddp.launch.log.record [NAME...]      # some five minutes for all on two cores
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from ddp.launch.log.evidence import gathered
from ddp.launch.log.judge import judge
from ddp.launch.log.verdict import Verdict
from tests.ddp.launch.log.failures import FAILURES, Failure, provoke, style_of
from tests.support.launch import REPOSITORY

BAR = re.compile(
    r"[\r\n][^\r\n]*epoch 0: [^\r\n]*\| (?:[1-9]|1[0-8])/20 [^\r\n]*(?=[\r\n])"
)  # all but its first and last state
RECORDED = Path(__file__).with_name("recorded.json")
PAGE = REPOSITORY / "ddp/launch/failures.md"
HEAD = """\
# Failures, and what the doctor says of their logs

Each row is a small job of two ranks that fails under torchrun, on gloo. Its log was given to
`python -m ddp.launch.doctor --explain LOG`. The table is written by `python -m tests.ddp.launch.log.record`, from
[`failures.py`](../../tests/ddp/launch/log/failures.py).

- **Log**: *merged* is the output of both ranks in one file. *tee* has torchrun's prefixes, and *srun* those of
  `srun --label`. *folder* is that of `torchrun --log-dir`.
- **Right**: the rank to blame, the line of the script and the cause are those of the first failure.
- *Most likely* stands where the log leaves a doubt.

The doctor was tuned on these logs, so they do not tell how often it is right on others.

"""
LOGS_OF_OTHERS = "\n## Logs of others\n"  # this section is written by hand: posted logs are not kept here


class Score(NamedTuple):
    """Whether the answer names the rank, the line and the cause; and whether it is certain of a wrong one."""

    rank: bool
    line: bool
    cause: bool
    certain_and_wrong: bool

    @property
    def right(self) -> bool:
        return self.rank and self.line and self.cause


def score(failure: Failure, verdict: Verdict | None) -> Score:
    if verdict is None:
        return Score(False, False, False, False)
    place = verdict.place
    # If two ranks fail alike, torchrun may end one before it prints anything.
    rank = verdict.ranks == failure.ranks or (failure.ranks == (0, 1) and verdict.ranks in ((0,), (1,)))
    line = not failure.lines or (place is not None and place.file.endswith("train.py") and place.line in failure.lines)
    cause = re.search(failure.says, verdict.cause) is not None
    return Score(rank, line, cause, verdict.certain and not (cause and rank))


def explained(files: dict[str, str], folder: Path) -> Verdict | None:
    """The verdict on a recorded log."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return judge(gathered([folder]))


def recorded() -> dict[str, dict[str, str]]:
    logs: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    return logs


def record(name: str) -> dict[str, str]:
    """The files of a failure's log, without names of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        return anonymous(provoke(name, Path(folder)), folder)


def anonymous(log: Path, folder: str) -> dict[str, str]:
    """The files of a log, without names of this machine, and with the first and the last state of each progress bar."""
    names = {
        folder: "/home/me/job",
        sys.prefix: "/home/me/venv",
        sys.base_prefix: "/usr/local",
        str(REPOSITORY): "/home/me/raw-ddp",
    }
    found = {}
    for path in sorted(log.rglob("*")) if log.is_dir() else [log]:
        text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        for old, new in names.items():
            text = text.replace(old, new)
        text = BAR.sub("", re.sub(r"(?<=host      : ).*", "node1", text))
        if text:
            name = str(path.relative_to(log)) if log.is_dir() else path.name
            found[re.sub(r"(?<=none_)\w+", "x", name)] = text
    return found


def row(name: str, verdict: Verdict | None) -> str:
    """A line of the table."""
    scored = score(FAILURES[name], verdict)
    said = "nothing"
    if verdict is not None:
        place = f", train.py:{verdict.place.line}" if verdict.place and verdict.place.file.endswith("train.py") else ""
        said = (
            ("" if verdict.certain else "most likely ")
            + str(verdict)[:60].replace("|", "\\|").replace("<", "&lt;")
            + place
        )
    return f"| {name} | {style_of(name)} | {said} | {'yes' if scored.right else 'no'} |\n"


def page(logs: dict[str, dict[str, str]]) -> str:
    verdicts = {}
    for name, files in logs.items():
        with tempfile.TemporaryDirectory() as folder:
            verdicts[name] = explained(files, Path(folder))
    right = sum(score(FAILURES[name], verdict).right for name, verdict in verdicts.items())
    wrong = sum(score(FAILURES[name], verdict).certain_and_wrong for name, verdict in verdicts.items())
    total = f"Right are {right} of {len(verdicts)}; {wrong} name a wrong cause as certain.\n\n"
    return (
        HEAD
        + total
        + "| failure | log | it says | right |\n|---|---|---|---|\n"
        + "".join(row(*one) for one in verdicts.items())
        + LOGS_OF_OTHERS
        + PAGE.read_text().partition(LOGS_OF_OTHERS)[2]
    )


def main() -> None:
    logs = recorded() if RECORDED.exists() else {}
    for name in sys.argv[1:] or FAILURES:
        logs[name] = record(name)
        print(name, flush=True)
        ordered = {name: logs[name] for name in FAILURES if name in logs}
        RECORDED.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(recorded()))


if __name__ == "__main__":
    main()
