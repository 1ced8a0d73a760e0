"""71 failures, each under torchrun: the first failure's rank, line and cause are named, and no wrong one is said to be certain."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp.launch.log.evidence import gathered
from ddp.launch.log.judge import judge
from tests.ddp.launch.log.failures import FAILURES, provoke
from tests.ddp.launch.log.record import PAGE, explained, page, recorded, score

LOGS = recorded()


def test_the_first_failure_is_named(tmp_path: Path) -> None:
    """The rank, line and cause of the first failure are right in every recorded log."""
    assert LOGS.keys() == FAILURES.keys()
    scores = {
        name: score(FAILURES[name], explained(files, tmp_path / str(number)))
        for number, (name, files) in enumerate(LOGS.items())
    }
    wrong = [name for name, one in scores.items() if not one.right]
    assert wrong == []


def test_the_page_is_of_these_logs() -> None:
    assert PAGE.read_text() == page(LOGS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if index % 3 else pytest.mark.examples)
        for index, name in enumerate(FAILURES)
    ],
)
def test_it_is_so_today(name: str, tmp_path: Path) -> None:
    """A failure that is named in its recorded log is also named when it is provoked anew."""
    verdict = judge(gathered([provoke(name, tmp_path)]))
    now, then = score(FAILURES[name], verdict), score(FAILURES[name], explained(LOGS[name], tmp_path / "recorded"))
    assert not now.certain_and_wrong
    assert now.right or not then.right, verdict
