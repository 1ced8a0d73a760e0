"""Programs that share their ranks: each is a function that both ranks call, and that asserts something."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks

Program = Callable[[], None]


def failures(programs: Sequence[Program], world_size: int = 2, fresh: bool = False) -> dict[str, str]:
    """Run programs one after another, until one fails; the traceback of that one, and a word on those that were not run, by name."""
    reports: dict[str, str] = {}
    for report in run_ranks(_failure, world_size, programs, timeout_s=280, fresh=fresh):
        reports |= report
    if reports:
        names = [program.__name__ for program in programs]
        last = max(map(names.index, reports))
        reports |= dict.fromkeys(names[last + 1 :], f"was not run, as {names[last]} failed")
    return reports


def _failure(programs: Sequence[Program]) -> dict[str, str]:
    with process_group(timeout_s=20):
        for program in programs:
            try:
                program()
            except Exception:
                return {program.__name__: traceback.format_exc()}  # the other ranks may wait for this one
            gc.collect()  # no hook of this program's wrappers meets the next program
    return {}


def as_tests(programs: Sequence[Program], world_size: int = 2) -> Any:
    """A file's fixture ``failed`` and its test ``test_program``: each program is a test that passes where it did not fail."""

    @pytest.fixture(scope="module")
    def failed() -> dict[str, str]:
        return failures(programs, world_size)

    @pytest.mark.parametrize("program", programs)
    def test_program(program: Program, failed: dict[str, str]) -> None:
        assert program.__name__ not in failed, failed[program.__name__]

    return failed, test_program
