"""ddp/resilience/profiling.py: traces with the named parts of a step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ddp.rendezvous.process_group import process_group
from ddp.resilience.profiling import ACTIVE, profile_steps
from tests.support.launch import run_program


@pytest.mark.filterwarnings("ignore")  # torch.profiler's own
def test_a_run_that_is_too_short_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with process_group() as env, profile_steps(env, tmp_path) as step_done:
        step_done()
    assert "no trace" in caplog.text


def test_the_recorded_steps_have_their_parts_and_no_error_is_printed(tmp_path: Path) -> None:
    """In a process of its own: Kineto reads its level once."""
    program = """
import pathlib, sys, warnings
warnings.simplefilter("ignore")  # torch.profiler's own
import torch
from ddp.rendezvous.process_group import process_group
from ddp.resilience.profiling import ACTIVE, WAIT, WARMUP, profile_steps
with process_group("cpu") as env, profile_steps(env, pathlib.Path(sys.argv[1])) as step_done:
    for _ in range(WAIT + WARMUP + ACTIVE + 1):
        with torch.profiler.record_function("forward"):
            torch.ones(4).sum()
        step_done()
"""
    done = run_program(program, tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    with gzip.open(tmp_path / "rank0.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("forward") == ACTIVE
