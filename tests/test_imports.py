"""``--help`` of every command is quick: it imports nothing that only the command's work needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import REPOSITORY

COMMANDS = [
    *("ddp.train", "ddp.evaluate", "ddp.bench", "ddp.checkpoint", "ddp.timeline"),
    *("dataparallel.train", "dataparallel.bench"),
    *("dataloading.bench", "dataloading.timeline", "dataloading.ladder"),
    *("dataloading.lfw_dataset", "dataloading.http_server"),
]
NOT_FOR_HELP = ("matplotlib", "torchvision", "psutil", "PIL")
PROGRAM = f"""
import runpy, sys
command = sys.argv[1]
sys.argv = [command, "--help"]
try:
    runpy.run_module(command, run_name="__main__", alter_sys=True)
finally:
    print(sorted(set({NOT_FOR_HELP!r}) & sys.modules.keys()), file=sys.stderr)
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_that_it_does_not_need(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert command in done.stdout
    assert done.stderr.strip() == "[]"
