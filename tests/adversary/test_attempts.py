"""Each attempt comes out as told."""

from __future__ import annotations

import pytest

from tests.adversary.attempt import Attempt, Verdict, describe, judge
from tests.adversary.attempts import files, folders, images, launches, limits, output, signals
from tests.adversary.run import is_missing, run

EVERY = {
    f"{module.__name__.rpartition('.')[2]}-{number:03}": attempt
    for module in (launches, files, folders, output, images, limits, signals)
    for number, attempt in enumerate(module.ATTEMPTS)
}


@pytest.mark.adversary
@pytest.mark.parametrize("attempt", EVERY.values(), ids=EVERY)
def test_an_attempt_comes_out_as_told(attempt: Attempt) -> None:
    """An attempt ends with the exit status and the line that it foretells, and leaves nothing behind.

    Claim (README.md): each attempt to break a command ends as its table says.
    """
    if missing := is_missing(attempt):
        pytest.skip(missing)
    outcome = run(attempt)
    assert judge(attempt, outcome) is Verdict.AS_TOLD, describe(attempt, outcome)
