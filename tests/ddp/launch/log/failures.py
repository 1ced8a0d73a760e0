"""Small jobs that fail in 71 ways, the first failure of each, and a way to run them under torchrun.

They stand in failures.txt: a heading, what the log must tell, and a script that follows another one. The line that fails first, or at which
the others wait, ends in ``# HERE``.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.launch import FORK_SERVER, free_port, kill_tree

STYLES = ("merged", "tee", "folder", "srun")  # how a job's output reaches its log


class Failure(NamedTuple):
    """A job of two ranks that fails.

    :ivar script: train.py
    :ivar ranks: those to blame; none if it is the launcher
    :ivar says: what the verdict says of the cause, as a pattern
    :ivar settings: how it is started
    """

    script: str
    ranks: tuple[int, ...]
    says: str
    settings: Mapping[str, str]

    @property
    def lines(self) -> set[int]:
        """The numbers of the lines of which one is to be named."""
        return {number for number, line in enumerate(self.script.splitlines(), 1) if line.endswith("# HERE")}


def _read() -> dict[str, Failure]:
    text = Path(__file__).with_suffix(".txt").read_text()
    scripts = {"": ""}
    found = {}
    for section in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        head, _, body = section.partition("\n\n")
        name, *lines = head.splitlines()
        settings = dict(line.split(": ", 1) for line in lines if not line.endswith(": "))
        scripts[name] = scripts[settings.get("after", "")] + body.rstrip() + "\n"
        if "says" in settings:
            ranks = tuple(map(int, re.findall(r"\d", settings.get("ranks", ""))))
            found[name] = Failure(scripts[name], ranks, settings["says"], settings)
    return found


FAILURES = _read()


def style_of(name: str) -> str:
    return STYLES[list(FAILURES).index(name) % len(STYLES)]


def provoke(name: str, folder: Path, timeout_s: float = 120.0) -> Path:
    """Run the job under torchrun, and return its log: a file, or a folder of files."""
    failure, style = FAILURES[name], style_of(name)
    log = folder / "logs"
    log.mkdir()
    (folder / "train.py").write_text(failure.script)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1] if "port" in failure.settings else free_port()
        flags = failure.settings.get("flags", f"--master-port={port}").replace("PORT", str(port)).split()
        if style != "merged":
            flags += (
                ["--redirects=3", f"--log-dir={log}"]
                if style == "folder"
                else ["--tee=3", f"--log-dir={folder / 'tee'}"]
            )
        arguments = ["--nproc-per-node=2", *flags, str(folder / failure.settings.get("script", "train.py"))]
        printed = log / "job.out"
        agent = FORK_SERVER.Process(target=torchrun, args=(arguments, failure.settings.get("env", ""), str(printed)))
        agent.start()
        try:
            if "kill" in failure.settings:
                while not any("epoch" in file.read_text() for file in log.rglob("*.*") if file.is_file()):
                    time.sleep(0.2)
                os.kill(agent.pid or 0, signal.SIGTERM)
            agent.join(timeout_s)
            assert agent.exitcode is not None, f"{name} did not end:\n{printed.read_text()}"
        finally:
            if agent.exitcode is None:
                kill_tree(agent.pid or 0)
            agent.join()
    if style == "srun":
        printed.write_bytes(re.sub(rb"^\[default(\d)\]:", rb"\1: ", printed.read_bytes(), flags=re.MULTILINE))
    return log if style == "folder" else printed


def torchrun(arguments: list[str], env: str, output: str) -> None:
    """``ENV torchrun ARGUMENTS > OUTPUT 2>&1``, in a process that has imported torch already."""
    from torch.distributed import run

    os.environ.update({"OMP_NUM_THREADS": "1", **dict(pair.split("=") for pair in env.split())})
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    try:
        run.main(arguments)
    except Exception as error:
        with contextlib.suppress(AttributeError):
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))  # type: ignore[union-attr]
        sys.exit(1)
