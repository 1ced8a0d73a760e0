"""Each attempt comes out as told; the README has the table of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adversary.__main__ import TABLE, describe
from tests.adversary.attempt import Attempt, Verdict, judge
from tests.adversary.classes import CLASSES, table, totals
from tests.adversary.run import is_missing, run
from tests.support.launch import REPOSITORY

EVERY = {f"{name}-{i:03}": attempt for name, (_, made) in CLASSES.items() for i, attempt in enumerate(made)}


@pytest.mark.adversary
@pytest.mark.parametrize("attempt", EVERY.values(), ids=EVERY)
def test_an_attempt_comes_out_as_told(attempt: Attempt) -> None:
    if missing := is_missing(attempt):
        pytest.skip(missing)
    outcome = run(attempt)
    verdict = judge(attempt, outcome)
    assert verdict is Verdict.AS_TOLD, describe(attempt, outcome)


def test_the_readmes_have_the_table_of_the_last_counts() -> None:
    results = json.loads(TABLE.read_text())["classes"]
    assert table(results) in Path(__file__).with_name("README.md").read_text()
    assert totals(results) in (REPOSITORY / "README.md").read_text()
    assert {name: result["attempts"] for name, result in results.items()} == {
        name: len(attempts) for name, (_, attempts) in CLASSES.items()
    }
    for result in results.values():
        assert result["verdicts"] == dict.fromkeys(result["verdicts"], 0) | {"as told": result["attempts"]}
    assert len(EVERY) >= 300
