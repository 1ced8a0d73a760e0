"""Two hosts for the tests of a module, and the results of a run on one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harm.kill import forked_training
from tests.support.harm.left import outcome
from tests.support.harm.network import TwoHosts, two_hosts, why_not


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


@pytest.fixture(scope="session")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of :data:`tests.support.harm.kill.JOB` on one host."""
    with forked_training(tmp_path_factory.mktemp("on-one-host") / "run") as run:
        run.finish()
    return outcome(run.run_dir)
