"""``--help`` of every command is quick: it imports nothing that only the command's work needs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddp.bench.__main__ import BENCHMARKS
from tests.support.launch import run_program

COMMANDS = [
    *(
        "ddp.train",
        "ddp.evaluate",
        "ddp.bench",
        "ddp.checkpoint",
        "ddp.ladder",
        "ddp.audit",
        "ddp.audit.libraries",
        "ddp.museum",
    ),
    *("dataparallel.train", "dataparallel.bench"),
    *("dataloading.bench", "dataloading.ladder"),
    *("dataloading.lfw_dataset", "maintain.recording", "maintain.measure"),
    *(f"ddp.bench {name}" for name in BENCHMARKS),
]
NOT_FOR_HELP = ("matplotlib", "torchvision", "torch._dynamo", "psutil", "PIL")
# Each command runs in a process of its own, forked from one that has imported torch, so that torch is imported only once.
PROGRAM = f"""
import contextlib, io, json, os, runpy, sys
import torch

for command in {COMMANDS!r}:
    if os.fork() == 0:
        output, status = io.StringIO(), 0
        module, *arguments = command.split()
        sys.argv = [module, *arguments, "--help"]
        try:
            with contextlib.redirect_stdout(output):
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
        imported = sorted(set({NOT_FOR_HELP!r}) & sys.modules.keys())
        print(json.dumps([command, status, command in output.getvalue(), imported]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def helped() -> dict[str, list[Any]]:
    """For each command its exit status, whether the help names it, and what it imported without need."""
    return {command: rest for command, *rest in map(json.loads, run_program(PROGRAM).stdout.splitlines())}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_that_it_does_not_need(helped: dict[str, list[Any]], command: str) -> None:
    assert helped[command] == [0, True, []]
