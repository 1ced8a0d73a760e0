"""common/distributed/rank_logging.py: who says what, and where it goes."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch

from common.distributed.dist_env import DistEnv
from common.distributed.rank_logging import Progress, add_log_file, rank_logging
from ddp.rendezvous.process_group import process_group
from tests.support.launch import run_ranks, run_torchrun


def talk(folder: Path) -> str:
    """Say something at each level, and fail; what the console got."""
    console = io.StringIO()
    with (
        contextlib.suppress(ZeroDivisionError),
        contextlib.redirect_stderr(console),
        warnings.catch_warnings(),
        process_group() as env,
        rank_logging(env),
    ):
        add_log_file(env, folder)
        warnings.simplefilter("always")  # a warning is shown once per process otherwise
        logging.getLogger("test").info("begun")
        logging.getLogger("test").warning("careful")
        warnings.warn("captured", stacklevel=1)
        raise ZeroDivisionError("oh")
    return console.getvalue()


def test_the_console_shows_rank_0_and_all_warnings_and_each_rank_s_file_has_everything(tmp_path: Path) -> None:
    consoles = run_ranks(talk, 2, tmp_path)
    assert ["begun" in text for text in consoles] == [True, False]
    for rank, text in enumerate(consoles):
        assert re.search(rf"WARNING \[rank {rank}/2 \S+ cpu\] careful", text)
        assert "captured" in text
        assert re.search(rf"ERROR   \[rank {rank}/2 \S+ cpu\] ZeroDivisionError: oh", text)
        assert "Traceback" not in text  # Python prints it, once
        in_file = (tmp_path / f"rank{rank}.log").read_text()
        for part in ("begun", "careful", "captured", "ZeroDivisionError: oh"):
            assert part in in_file


@pytest.mark.examples
def test_torchrun_s_report_has_the_traceback_of_the_rank_that_failed() -> None:
    """The traceback of the rank that failed is in torchrun's report, with the rank.

    Claim (README.md): a failure of the program keeps its traceback, with the rank, in torchrun's report.
    """
    done = run_torchrun(2, "tests.ddp.rendezvous.crashing")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("tests.ddp.rendezvous.crashing FAILED") :]
    assert "rank      : 1" in report
    assert "ZeroDivisionError: on purpose" in report


def test_progress_without_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("common.distributed.rank_logging.SECONDS_BETWEEN_LINES", 0.0)
    with process_group() as env, rank_logging(env), Progress(env, "train", total=10) as progress:
        progress.advance(4, "loss 0.5")
        monkeypatch.setattr("common.distributed.rank_logging.SECONDS_BETWEEN_LINES", 1000.0)
        progress.advance(6, "loss 0.1")
    err = capsys.readouterr().err
    assert "train: step 4 of 10, loss 0.5" in err
    assert "loss 0.1" not in err


class Interrupted(io.FileIO):
    """A file in which a signal handler logs a line while another is being written."""

    armed = True

    def write(self, data: object) -> int:
        if self.armed:
            self.armed = False
            logging.getLogger("inner").warning("stopped by SIGINT")
        return super().write(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["the file", "the console"])
def test_a_line_in_the_middle_of_another_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    path = tmp_path / ("rank0.log" if where == "the file" else "console")
    stream = io.TextIOWrapper(io.BufferedWriter(Interrupted(path, "w")), line_buffering=True)
    with rank_logging(DistEnv.alone(torch.device("cpu"))):
        if where == "the file":
            add_log_file(DistEnv.alone(torch.device("cpu")), tmp_path)
            files = [one for one in logging.getLogger().handlers if isinstance(one, logging.FileHandler)]
            before = next(file for file in files if file.baseFilename == str(path)).setStream(stream)
            assert before is not None
            before.close()
        else:
            monkeypatch.setattr("sys.stderr", stream)
        logging.getLogger("outer").warning("an ordinary line")
        monkeypatch.undo()
    stream.close()
    lines = path.read_text().splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["an ordinary line", "stopped by SIGINT"]
    assert "Traceback" not in capfd.readouterr().err
