"""tests/README.md: its table of claims is that of the tests, each of which says what it asserts."""

from __future__ import annotations

from tests.project.claims import PAGES, README, all_claims, rewritten


def test_the_table_is_current() -> None:
    """tests/README.md is as ``python -m tests.project.claims`` makes it from the docstrings of the tests."""
    assert README.read_text() == rewritten(README.read_text())


def test_every_page_has_claims_and_every_test_says_what_it_asserts() -> None:
    """Each README has at least six claims, and the docstring of each test that proves one begins with a sentence."""
    claims = all_claims()
    assert all(len({claim.sentence for claim in claims if claim.page == page}) >= 6 for page in PAGES)
    assert [
        claim.test for claim in claims if not claim.asserts.endswith((".", ":")) or "Claim (" in claim.asserts
    ] == []
