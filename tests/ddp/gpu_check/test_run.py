"""``ddp/gpu_check/run.sh``: a list of commands of which one that fails or hangs does not end the others."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.launch import REPOSITORY, start_program

SCRIPT = str(REPOSITORY / "ddp" / "gpu_check" / "run.sh")
PROGRAMS = {
    "python": '[ "$1" != -c ] || echo 0 0 a machine',
    "torchrun": """case "$*" in
        *bf16*) echo 'error: --precision bf16: use another'; exit 2 ;;
        *zero1*) (sleep 1001 &); sleep 1002 ;;
        *--resume) echo 'resuming after step 5' ;;
    esac""",
    "timeout": f'shift 2; exec {shutil.which("timeout")} --kill-after=1 2 "$@"',
}


def programs(folder: Path) -> dict[str, str]:
    """An environment in which python and torchrun only pretend, and a command that is given a limit has two seconds."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def sleeping() -> list[list[str]]:
    """The commands of :data:`PROGRAMS` that should have ended."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if line[:1] == ["sleep"] and line[1].startswith("100")]


@pytest.mark.faults
def test_one_that_fails_or_hangs_does_not_end_the_others_and_nothing_outlives_it(tmp_path: Path) -> None:
    """One that fails or hangs does not end the others and nothing outlives it.

    Claim (ddp/README.md): on a GPU: gpu-check names what fails, hangs or does not apply, and nothing outlives it.
    """
    output = tmp_path / "a folder"
    with start_program("bash", SCRIPT, "--output", str(output), env=programs(tmp_path)) as process:
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert sleeping() == []
    assert printed == (output / "summary.txt").read_text()
    lines = {line.split()[3]: line for line in printed.splitlines() if line.startswith(("ok", "failed"))}
    # The pretended torchrun writes no profile.
    assert {name for name, line in lines.items() if line.startswith("failed")} == {"bf16", "zero1", "profile"}
    assert "exit status 2; " in lines["bf16"] and "no end within 90 s" in lines["zero1"]
    assert re.search(r"^left out +gpu-tests +it needs a GPU$", printed, re.MULTILINE)
    assert (output / "bf16.log").read_text().endswith("\n\nerror: --precision bf16: use another\n")


@pytest.mark.faults
def test_ctrl_c_ends_what_runs(tmp_path: Path) -> None:
    environment = programs(tmp_path)
    (tmp_path / "torchrun").write_text("#!/bin/sh\nsleep 1003\n")
    with start_program("bash", SCRIPT, "--output", str(tmp_path / "out"), env=environment) as process:
        while not sleeping():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert sleeping() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--device", "tpu"), "gpu-check takes --device cpu or cuda, and --output FOLDER; here is '--device tpu'"),
        (("--output",), "gpu-check takes --device cpu or cuda"),
        (("--device", "cuda"), "--device cuda, but torch sees no GPU here: use --device cpu"),
        (("--output", "."), "--output .: give a new or an empty folder"),
    ],
)
def test_a_mistake_is_one_line(flags: tuple[str, ...], words: str, tmp_path: Path) -> None:
    with start_program("bash", SCRIPT, *flags, env=programs(tmp_path)) as process:
        _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr.count("\n")) == (2, 1)
    assert words in stderr


@pytest.mark.examples
@pytest.mark.timeout(900)
def test_all_that_apply_pass_on_the_cpu(tmp_path: Path) -> None:
    """All commands that apply pass on the CPU.

    Claim (ddp/README.md): on a GPU: all checks of gpu-check that apply to the CPU pass there.

    Claim (ddp/README.md): the longer benches run and write their figures.
    """
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    flags = ("--device", "cpu", "--output", str(tmp_path / "out"))
    with start_program("bash", SCRIPT, *flags, env=path) as process:
        printed, _ = process.communicate(timeout=800)
    assert process.returncode == 0, printed
    left_out = re.findall(r"^left out +(\S+)", printed, re.MULTILINE)
    assert left_out == ["gpu-tests", "compile"]

    for bench in ("scaling", "safety", "overhead"):
        assert re.search(rf"{bench}.json, \w+\.png$", (tmp_path / "out" / f"{bench}.log").read_text(), re.MULTILINE)
