"""common/errors.py: what an error, a figure or a table shows of names that come from outside."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import one_line, printable


@pytest.mark.parametrize(
    ("name", "shown", "line"),
    [
        ("Åsa 日本", "Åsa 日本", "Åsa 日本"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9", r"caf\xe9"),
        ("a\nb\t\x1b[31mc", r"a\nb\t\x1b[31mc", "a b [31mc"),
        ("\ud800", r"\ud800", ""),
    ],
)
def test_a_name_is_shown_as_it_can_be(name: str, shown: str, line: str) -> None:
    assert (printable(name), one_line(name)) == (shown, line)


@given(st.binary())
def test_every_name_that_a_file_may_have_can_be_written(name: bytes) -> None:
    for text in (printable(os.fsdecode(name)), one_line(os.fsdecode(name))):
        assert text.isprintable()
        text.encode()
