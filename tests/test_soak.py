"""tests/soak.py: runs that are killed at any moment end with the right bits; five of them with ``-m faults``, fifty with ``-m slow``."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import run_command

ONE_WAY = "fp16,2 workers,2 micro-steps,handwritten"


def assert_all_right(kills: int, *flags: str, timeout_s: float = 850) -> None:
    done = run_command("tests.soak", "--kills", str(kills), *flags, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"^(\d+) of (\d+) runs ended with the right bits, after (\d+) kills$", done.stdout, re.MULTILINE)
    assert told is not None
    assert int(told[1]) == int(told[2]) == kills <= int(told[3])


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_three_kills() -> None:
    """A run that is killed three times at random moments ends with the bits of an undisturbed one.

    Claim (README.md): a run that is killed at any moment ends with the bits that it would have had.
    """
    assert_all_right(3, "--only", ONE_WAY)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_two_kills_of_a_sharded_run() -> None:
    """A sharded run that is killed twice ends with the bits of an undisturbed one.

    Claim (ddp/sharded/README.md, 9): a sharded run that is killed ends with the right bits.
    """
    assert_all_right(2, "--only", "fp32,zero3")


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_fifty_kills() -> None:
    """Fifty runs of fifty that are killed at random moments end with the bits of an undisturbed one.

    Claim (README.md): fifty runs of fifty that are killed at random moments end with the bits that they would have
    had.
    """
    assert_all_right(50, timeout_s=5300)
