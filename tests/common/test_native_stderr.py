"""common/native_stderr.py: a store that does not answer is told in lines, not in pages of stack frames."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.native_stderr import frames_to_log
from tests.support.launch import error_lines, free_port, run_command

TEXT = b"[W] no answer\nException raised from x at y.cpp:3\nframe #0: f() + 0x9d (0x7f in libc10.so)\n<omitting python frames>\n\n"


class Wrong(Exception):
    """Ends a block."""


def fail(log: Path, text: bytes) -> None:
    with frames_to_log(log):
        os.write(2, text)
        raise Wrong


def test_lines_pass_and_frames_do_not(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "run" / "logs" / "rank0.log"
    with frames_to_log(log):
        os.write(2, TEXT)
    assert not log.exists()
    with pytest.raises(Wrong):
        fail(log, TEXT + b"the end")
    os.write(2, b" and after\n")
    assert capfd.readouterr().err == "[W] no answer\n[W] no answer\nthe end and after\n"
    assert log.read_bytes() == TEXT + b"the end"


def test_a_folder_of_others_gets_no_log(tmp_path: Path) -> None:
    with pytest.raises(Wrong):
        fail(tmp_path / "logs" / "rank0.log", TEXT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    flags = ("ddp.train", "--device", "cpu", "--timeout", "2", "--run-dir", str(tmp_path / "run"))
    done = run_command(*flags, env=place | {"MASTER_PORT": str(free_port())})
    assert done.returncode == 2, done.stderr
    assert len(error_lines(done.stderr)) == 1
    assert "no rendezvous at MASTER_ADDR 127.0.0.1" in error_lines(done.stderr)[0]
    assert "frame #" not in done.stderr
    assert b"frame #0: " in (tmp_path / "run" / "logs" / "rank1.log").read_bytes()
