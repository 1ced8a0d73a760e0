"""``--help`` of the benchmarks and of the timeline answers before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.launch import REPOSITORY, clean_environment

# One process asks all commands, so that torch is imported once.
ASK = """
import contextlib, io, runpy, sys
for command, *arguments in {commands!r}:
    sys.argv = [command, *arguments, "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        runpy.run_module(command, run_name="__main__", alter_sys=True)
    assert "--output" in text.getvalue() or not arguments and "NAME --help" in text.getvalue(), (command, arguments)
print(*(name for name in {heavy!r} if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("commands", "heavy"),
    [
        (
            [
                ("ddp.bench",),
                ("ddp.bench", "allreduce"),
                ("ddp.bench", "engines"),
                ("ddp.bench", "costs"),
                ("ddp.bench", "sharding"),
                ("ddp.bench", "memory"),
                ("ddp.timeline",),
                ("dataparallel.bench",),
            ],
            ("matplotlib", "torchvision", "torch._dynamo"),
        ),
        (
            [("ddp.bench", name) for name in ("overhead", "safety", "strategies")],
            ("matplotlib", "torchvision"),
        ),
    ],
    ids=["bench and timeline", "with the trainer"],
)
def test_nothing_heavy_is_imported(commands: list[tuple[str, ...]], heavy: tuple[str, ...]) -> None:
    code = ASK.format(commands=commands, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, env=clean_environment()
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
