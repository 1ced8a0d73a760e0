"""common/command_line/error_line.py: which rank prints a user error, and when."""

from __future__ import annotations

import os

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from common.command_line.error_line import WAIT_FOR_LOCAL_RANK_ZERO_S, WAIT_IF_PRINTED_S, print_error
from common.errors import UsageError
from tests.support.launch import error_lines, run_torchrun


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept; and an environment without a job."""
    for name in os.environ:
        if name.startswith(("TORCHELASTIC", "MASTER_")) or "RANK" in name:
            monkeypatch.delenv(name)
    slept: list[float] = []
    monkeypatch.setattr("common.command_line.error_line.time.sleep", slept.append)
    return slept


def wrong(seen_by_all: bool = False) -> UsageError:
    error = UsageError("--lr 0 is out of range")
    error.seen_by_all = seen_by_all
    return error


Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("rank", [None, "0", "abc"])
def test_the_first_rank_of_a_node_prints_at_once(
    rank: str | None, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    print_error(wrong())
    assert (waits, capsys.readouterr().err) == ([], "error: --lr 0 is out of range\n")


def test_another_prints_only_if_nobody_ends_it_while_it_waits(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "3")
    print_error(wrong())
    assert waits == [WAIT_FOR_LOCAL_RANK_ZERO_S]
    assert capsys.readouterr().err == "error: [rank 3] --lr 0 is out of range\n"


def test_another_is_silent_when_all_have_met_the_error(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    print_error(wrong(seen_by_all=True))
    assert (waits, capsys.readouterr().err) == ([WAIT_IF_PRINTED_S], "")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """The store of torchrun's agent."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    return store


def test_with_an_agent_s_store_the_first_that_comes_prints(
    agent: TCPStore, waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    printed = []
    for restart, node, rank in (("0", "0", "1"), ("0", "0", "0"), ("0", "1", "0"), ("1", "0", "1"), ("1", "0", "0")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        monkeypatch.setenv("GROUP_RANK", node)
        monkeypatch.setenv("LOCAL_RANK", rank)
        print_error(wrong())
        printed.append(capsys.readouterr().err)
    line = "error: --lr 0 is out of range\n"
    assert printed == [line, "", line, line, ""]  # once per node and per start of the job
    assert waits == [WAIT_IF_PRINTED_S] * 2


def test_errors_about_one_thing_are_printed_once_though_their_numbers_differ(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for rank in ("1", "0"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        error = UsageError(f"out of memory: {rank} bytes")
        error.about = "memory"
        print_error(error)
    assert capsys.readouterr().err == "error: out of memory: 1 bytes\n"


def test_under_torchrun_there_is_one_line() -> None:
    """Under torchrun, the line about bad input comes once.

    Claim (README.md): bad input is told once per node, not once per rank.
    """
    done = run_torchrun(2, "ddp.train", "--epochs", "0")
    assert done.returncode != 0
    (line,) = error_lines(done.stderr)
    assert line.startswith("error: --epochs 0 is out of range")
