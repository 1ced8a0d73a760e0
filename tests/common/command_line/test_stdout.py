"""common/command_line/stdout.py: a reader that has gone, a full disk and a closed stdout."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.launch import REPOSITORY, clean_environment, run_program

PROGRAM = """
import logging
from common.command_line.cli import command
from common.command_line.stdout import print_results
logging.basicConfig()

@command
def results() -> None:
    print_results("12.3 %")

@command
def table() -> None:
    print("12.3 %")
"""


def end_of(function: str, stdout: str) -> tuple[int, str]:
    """The exit status and stderr of a command whose stdout is a path, a pipe without a reader, or closed."""
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", f"{PROGRAM}\n{function}()"]
    if stdout == "closed":
        program = ["sh", "-c", 'exec "$@" >&-', "sh", *program]
    with open(os.devnull if "/" not in stdout else stdout, "w") as file:
        done = subprocess.run(
            program, stdout=writer if stdout == "pipe" else file, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY,
            env=clean_environment(), timeout=60,
        )  # fmt: skip
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("function", ["results", "table"])
@pytest.mark.parametrize("stdout", ["pipe", "closed"])
def test_a_reader_who_has_gone_is_no_failure(function: str, stdout: str) -> None:
    """A closed pipe at stdout ends a command without a traceback.

    Claim (ddp/resilience/README.md): a closed or full stdout is no traceback.
    """
    assert end_of(function, stdout) == (0, "")


def test_a_stdout_that_cannot_be_written_is_named() -> None:
    """A stdout that cannot be written is named.

    Claim (ddp/resilience/README.md): a closed or full stdout is no traceback.
    """
    words = "stdout cannot be written (No space left on device)"
    assert end_of("table", "/dev/full") == (2, f"error: {words}\n")
    status, said = end_of("results", "/dev/full")
    assert (status, said) == (
        0,
        f"WARNING:common.command_line.stdout:{words}: the summary is lost, the results are complete\n",
    )


def test_a_name_that_is_no_utf_8_can_be_printed() -> None:
    program = f"{PROGRAM}\n@command\ndef name():\n    print('caf\\udce9')\nname()"
    done = run_program(program, env={"PYTHONIOENCODING": "utf-8"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\udce9\n", "")
