"""Every check finds a wrapper that has the one defect for which the check was made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddp.conformance.check import CHECKS, Check
from ddp.conformance.runner import FAILED, Runner
from tests.ddp.conformance.mutants import MUTANTS

FIRST_OF_TOPIC = list({check.topic: check for check in reversed(CHECKS)}.values())


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Two ranks. A mutant that makes its check hang costs the time limit."""
    with Runner(2, time_limit_s=5) as runner:
        yield runner


def test_every_check_has_a_mutant() -> None:
    assert {check.run.__name__ for check in CHECKS} == MUTANTS.keys()


@pytest.mark.parametrize("check", FIRST_OF_TOPIC, ids=lambda check: check.topic)
def test_a_mutant_of_each_topic_is_caught(runner: Runner, check: Check) -> None:
    """A mutant of each topic is caught.

    Claim (ddp/conformance/README.md): a broken wrapper per check is caught; by default for one check of each topic.
    """
    require_caught(runner, check)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.run.__name__)
def test_each_mutant_is_caught(runner: Runner, check: Check) -> None:
    """Each mutant is caught.

    Claim (ddp/conformance/README.md): a broken wrapper per check is caught, for all checks.
    """
    require_caught(runner, check)


def require_caught(runner: Runner, check: Check) -> None:
    result = runner.run(check, f"tests.ddp.conformance.mutants:{check.run.__name__}")
    assert result.status in FAILED, result.message
    assert "NameError" not in result.message  # the mutant's own mistake
    assert "AttributeError" not in result.message
