"""The results of an undisturbed run, for the tests of runs that are stopped, killed, or on several hosts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.harm.kill import forked_training
from tests.support.harm.left import outcome


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of :data:`tests.support.harm.kill.JOB` on two ranks of one host."""
    with forked_training(tmp_path_factory.mktemp("undisturbed") / "run") as run:
        run.finish()
    return outcome(run.run_dir)
