"""tests/soak.py: runs that are killed at any moment end with the right bits; five of them with ``-m faults``, fifty with ``-m slow``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launch import run_command

ONE_WAY = "fp16,2 workers,2 micro-steps,handwritten"


def soak(output: Path, *flags: str, timeout_s: float) -> str:
    done = run_command("tests.soak", "--output", str(output), *flags, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_three_kills(tmp_path: Path) -> None:
    """A run that is killed three times at random moments ends with the bits of an undisturbed one.

    Claim (README.md): a run that is killed at any moment ends with the bits that it would have had.
    """
    said = soak(tmp_path, "--kills", "3", "--only", ONE_WAY, timeout_s=850)
    assert said.splitlines()[-1] == "3 of 3 runs ended with the right bits"
    results = json.loads((tmp_path / "soak.json").read_text())
    assert results["right"] == results["runs"] == 3
    assert results["kills"] >= 3


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_two_kills_of_a_sharded_run(tmp_path: Path) -> None:
    """A sharded run that is killed twice ends with the bits of an undisturbed one.

    Claim (ddp/sharded/README.md, 9): a sharded run that is killed ends with the right bits.
    """
    said = soak(tmp_path, "--kills", "2", "--only", "fp32,zero3", timeout_s=850)
    assert said.splitlines()[-1] == "2 of 2 runs ended with the right bits"


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_fifty_kills(tmp_path: Path) -> None:
    """Fifty runs of fifty that are killed at random moments end with the bits of an undisturbed one.

    Claim (README.md): fifty runs of fifty that are killed at random moments end with the bits that they would have
    had.
    """
    said = soak(tmp_path, "--kills", "50", timeout_s=5300)
    assert said.splitlines()[-1] == "50 of 50 runs ended with the right bits"
