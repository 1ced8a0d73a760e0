"""The museum: each exhibit has a bug that the audit finds at its line, and none once the bug is fixed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ddp.audit.names import NAMED
from ddp.museum.__main__ import FOLDER, diff_of, docstring, exhibits
from tests.ddp.audit.forked import judge
from tests.support.launch import run_command

MOST_LINES = 40
THREAD = re.compile(r"([\w-]+/[\w.-]+)#(\d+)")


def page() -> str:
    """The README of the museum: of each exhibit the story, and what fixes it. ``python -m tests.ddp.audit.test_museum`` writes it."""
    parts = [(FOLDER / "README.md").read_text().partition("\n## ")[0]]
    for name, path in exhibits().items():
        title, story = docstring(path)
        linked = THREAD.sub(r"[\1#\2](https://github.com/\1/issues/\2)", story)
        parts.append(f"## {title}\n\n[{name}]({path.relative_to(FOLDER)})\n{linked}\n\n```diff\n{diff_of(path)}\n```\n")
    return "\n".join(parts)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 puts other parentheses into the code of the diffs")
def test_the_page_is_that_of_the_exhibits() -> None:
    assert (FOLDER / "README.md").read_text() == page()


def test_every_exhibit_is_short() -> None:
    assert [name for name, path in exhibits().items() if len(path.read_text().splitlines()) > MOST_LINES] == []


@pytest.mark.examples
def test_an_exhibit_is_shown_both_ways() -> None:
    """Its story, its diff, and for both variants the number and what the audit says."""
    done = run_command("ddp.museum", "loss_not_divided")
    assert done.returncode == 0, done.stderr
    broken, fixed = done.stdout.partition("\nfixed:")[::2]
    assert "\n+" in broken
    assert "relative error" in broken
    assert "the loss is not divided" in broken
    assert "relative error" in fixed
    assert fixed.endswith("nothing wrong was found\n")


def test_an_unknown_exhibit_is_a_user_error() -> None:
    done = run_command("ddp.museum", "nothing")
    assert done.returncode == 2
    assert done.stderr == "error: nothing: there is no such exhibit; python -m ddp.museum lists them\n"


def test_an_exhibit_that_cannot_be_audited_is_an_error() -> None:
    done = run_command("ddp.museum", "same_order", env={"RANK": "0"})
    assert done.returncode == 2
    assert done.stderr == "error: same_order as it was found could not be audited; see above\n"
    assert "fixed:" not in done.stdout


@pytest.mark.examples
@pytest.mark.parametrize("name", exhibits())
def test_the_audit_finds_the_bug_and_nothing_else(tmp_path: Path, name: str) -> None:
    path = exhibits()[name]
    lines = enumerate(path.read_text().splitlines(), 1)
    named = [(f"{path}:{n}", line.partition(NAMED)[2]) for n, line in lines if NAMED in line]
    findings = judge(tmp_path, path)
    assert len(named) == 1
    assert [(finding.where, finding.name) for finding in findings] == named, findings
    assert judge(tmp_path, path, "--right") == []


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page())
