"""Runs a check as a user would, with a limit. Whatever happens, nothing that it has started outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from common.child_processes import descendants, end_all_but

PASSED, FAILED, HUNG, LEFT_OUT, NO_TIME = "passed", "FAILED", "HUNG", "left out", "no time"
LEAST_S = 5.0  # below which a check is not begun
LONGEST_REASON = 300


@dataclass(frozen=True)
class Outcome:
    """How a check ended.

    :param reason: why it did not pass; empty if it did
    """

    status: str
    seconds: float = 0.0
    reason: str = ""


def run_command(command: str, log: Path, limit_s: float, left_s: float, device: str, expects: str = "") -> Outcome:
    """Run a command of the shell, and wait for it.

    :param log: a file for what it prints
    :param limit_s: after which it counts as hung
    :param left_s: after which there is no time left for any check
    :param device: ``"cpu"`` hides the GPUs from it
    :param expects: a regular expression that its output must match if its exit status is 0
    """
    if left_s < LEAST_S:
        return Outcome(NO_TIME, 0.0, "the total limit was reached before it began")
    status: int | None = None
    process: subprocess.Popen[bytes] | None = None
    before, began = descendants(), time.monotonic()
    with open(log, "wb") as output:
        try:  # which a signal may also leave while the process starts
            process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(device),
                start_new_session=True,  # a terminal's Ctrl-C is for this process, which then ends that one
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(min(limit_s, left_s))
        finally:
            seconds, text = time.monotonic() - began, log.read_text(errors="replace")
            left = end_all_but(before, patiently=status is not None)
            if process is not None:
                process.wait()
    if status is None and limit_s <= left_s:
        return Outcome(HUNG, seconds, f"it did not end within {limit_s:.0f} s: {_last_line(text)}")
    if status is None:
        return Outcome(NO_TIME, seconds, f"the total limit was reached after {seconds:.0f} of its {limit_s:.0f} s")
    if status != 0:
        return Outcome(FAILED, seconds, f"exit status {status}: {_last_line(text)}")
    if left:
        return Outcome(FAILED, seconds, f"it left {left} process{'es' * (left > 1)} running")
    if expects and not re.search(expects, text):
        return Outcome(FAILED, seconds, f"its output has no '{expects}'")
    return Outcome(PASSED, seconds)


def _environment(device: str) -> dict[str, str]:
    """This process's, with the programs of its own Python first: torchrun is one."""
    found = dict(os.environ)
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found.get('PATH', '')}"
    found["PYTHONUNBUFFERED"] = "1"  # or what a check said before it hung would be lost
    return found | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})


def _last_line(text: str) -> str:
    """The line that says what went wrong: a user error, or else an exception, or else the last one with a word in it."""
    lines = [line.strip() for line in text.splitlines() if re.search("[a-z]", line)] or ["it printed nothing"]
    for sign in (r"^error: ", r"\w(Error|Exception)\b"):
        if signed := [line for line in lines if re.search(sign, line)]:
            return signed[-1][:LONGEST_REASON]
    return lines[-1][:LONGEST_REASON]
