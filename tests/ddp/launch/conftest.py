"""Two hosts for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.harm.network import TwoHosts, two_hosts, why_not


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair
