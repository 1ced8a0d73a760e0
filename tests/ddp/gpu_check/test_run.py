"""``python -m ddp.gpu_check``: checks that pass, fail, hang or are left out, none of which ends the others or outlives them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from common.distributed.process_group import TORCHRUN_VARIABLES
from ddp.bench.safety import AGAINST, PLAIN
from ddp.bench.strategies import CAUSES
from ddp.gpu_check import __main__ as gpu_check
from ddp.gpu_check import checks, results, runner
from ddp.gpu_check.checks import Check
from ddp.gpu_check.runner import FAILED, HUNG, LEFT_OUT, NO_TIME, PASSED
from tests.support.launch import run_command, run_ranks
from tests.support.user_errors import UserError

FAKE = [
    Check("passes", "a number", 'echo \'{{"difference": 0.5}}\' > {out}/equivalence.json', 60, results.of_equivalence),
    Check("says-why", "a user error", "echo 'error: --lr 0: use another'; echo ====; exit 2", 60),
    # It leaves one process whose parent has ended, and one in another session.
    Check("hangs", "a sleep", "(sleep 1001 &) ; setsid sleep 1002 & sleep 1003", 1),
    Check("leaves", "a daemon", "(setsid sleep 1004 &) ; true", 60),
    Check("silent", "what is not said", "echo hello", 60, expects="resuming after step \\d"),
    Check("no-numbers", "a file that is missing", "true", 60, results.of_equivalence),
    Check("cannot", "another machine", "echo {ranks} of {device}", 60, obstacle="it needs a GPU"),
    Check("writes", "checkpoints", "mkdir -p {out}/run/checkpoints/a; echo 1 | tee {out}/run/checkpoints/a/manifest.json "
          "{out}/run/metrics.jsonl {out}/model.pt; head -c 2000000 /dev/zero > {out}/trace.json", 60),
]  # fmt: skip


def run_fake(output: str) -> object:
    """The command with :data:`FAKE`; its exit status. It adopts orphans, and so changes its process for good."""
    for name in TORCHRUN_VARIABLES:
        del os.environ[name]
    arguments = ["ddp.gpu_check", "--device", "cpu", "--output", output]
    with (
        mock.patch.object(checks, "checks", return_value=FAKE),
        mock.patch("sys.argv", arguments),
        pytest.raises(SystemExit) as end,
    ):
        gpu_check.main()
    return end.value.code


def sleeping() -> list[str]:
    """The arguments of the sleeps that :data:`FAKE` starts and that still run."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line[1] for line in lines if line[:1] == ["sleep"] and line[1:] and line[1].startswith("100")]


@pytest.mark.faults
def test_one_that_fails_or_hangs_does_not_end_the_others_and_nothing_outlives_it(tmp_path: Path) -> None:
    """One that fails or hangs does not end the others and nothing outlives it.

    Claim (ddp/README.md): on a GPU: gpu-check names what fails, hangs or does not apply, and nothing outlives it;
    each of its commands is one that its program takes, for any number of GPUs.
    """
    output = tmp_path / "a folder"
    assert run_ranks(run_fake, 1, str(output), fresh=True) == [1]
    assert sleeping() == []
    written = json.loads((output / "summary.json").read_text())
    outcomes = {one["name"]: (one["outcome"]["status"], one["outcome"]["reason"]) for one in written["checks"]}
    assert outcomes == {
        "passes": (PASSED, ""),
        "says-why": (FAILED, "exit status 2: error: --lr 0: use another"),
        "hangs": (HUNG, "it did not end within 1 s: it printed nothing"),
        "leaves": (FAILED, "it left 1 process running"),
        "silent": (FAILED, "its output has no 'resuming after step \\d'"),
        "no-numbers": (FAILED, outcomes["no-numbers"][1]),
        "cannot": (LEFT_OUT, "it needs a GPU"),
        "writes": (PASSED, ""),
    }
    assert outcomes["no-numbers"][1].startswith("its results cannot be read: FileNotFoundError")
    assert written["checks"][0]["found"] == {"difference": 0.5}
    assert written["remaining"] == []
    assert written["machine"]["torch"]
    text = (output / "summary.txt").read_text()
    assert text.startswith("2 passed, 4 FAILED, 1 HUNG, 1 left out\n")
    assert "again:  echo 'error: --lr 0: use another'; echo ====; exit 2" in text
    assert written["checks"][6]["command"] == "echo 2 of cpu"
    kept = sorted(str(path.relative_to(output / "writes")) for path in (output / "writes").rglob("*"))
    assert kept == ["output.txt", "run", "run/metrics.jsonl"]


@pytest.mark.faults
def test_a_check_has_what_is_left_of_the_total_and_no_more(tmp_path: Path) -> None:
    def begin(limit_s: float, left_s: float) -> runner.Outcome:
        return runner.run_command("sleep 1005", tmp_path / "output.txt", limit_s, left_s, "cpu")

    with mock.patch.object(runner, "LEAST_S", 0.1):
        began = time.monotonic()
        cut = begin(60, 0.5)
        assert cut.status == NO_TIME
        assert re.fullmatch(r"the total limit was reached after \d of its 60 s", cut.reason)
        assert begin(60, 0.05).reason == "the total limit was reached before it began"
        assert begin(0.3, 60).status == HUNG
        assert time.monotonic() - began < 30
    assert sleeping() == []


def test_an_interrupt_ends_what_runs(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            runner.run_command("setsid sleep 1006 & sleep 1007", tmp_path / "output.txt", 60, 60, "cpu")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert sleeping() == []


def test_an_interrupt_while_a_process_starts_ends_it_too(tmp_path: Path) -> None:
    started = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: object, **settings: Any) -> None:
            super().__init__(*arguments, **settings)  # type: ignore[call-overload]
            started.append(self)
            raise KeyboardInterrupt

    with mock.patch.object(subprocess, "Popen", Interrupted), pytest.raises(KeyboardInterrupt):
        runner.run_command("exec sleep 1008", tmp_path / "output.txt", 60, 60, "cpu")
    assert sleeping() == []
    started[0].wait()  # or Popen warns that it still runs


def test_a_folder_that_holds_something(tmp_path: Path, user_error: UserError, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds anything but earlier results is refused by name, and kept."""
    monkeypatch.setattr(gpu_check, "adopt_orphans", lambda: None)
    (tmp_path / "summary.json").write_text("{}")
    flags = ("--device", "cpu", "--output", tmp_path)
    assert user_error(gpu_check.main, *flags).endswith("give another, or --overwrite to delete them")
    (tmp_path / "thesis.txt").write_text("all of it")
    found = user_error(gpu_check.main, *flags, "--overwrite")
    assert f"--output {tmp_path} holds thesis.txt, which no check has written" in found
    assert (tmp_path / "thesis.txt").exists()


def test_overwrite_deletes_the_results_of_an_earlier_check(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    for name in ("summary.json", "summary.txt", "versions/output.txt"):
        (tmp_path / name).write_text("old")
    gpu_check.take_folder(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.examples
@pytest.mark.timeout(900)
def test_all_checks_pass_on_the_cpu(tmp_path: Path) -> None:
    """All checks pass on the CPU.

    Claim (ddp/README.md): on a GPU: all checks of gpu-check that apply to the CPU pass there.

    Claim (ddp/README.md): the longer benches run and write their figures.
    """
    done = run_command("ddp.gpu_check", "--device", "cpu", "--output", str(tmp_path / "results"), timeout_s=800)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "results" / "summary.json").read_text())
    statuses = {one["name"]: one["outcome"]["status"] for one in written["checks"]}
    assert {name for name, status in statuses.items() if status == LEFT_OUT} == {
        *("gpu-tests", "equivalence-shared", "pinned", "compile")
    }
    assert set(statuses.values()) == {PASSED, LEFT_OUT}
    assert all(
        one["found"] for one in written["checks"] if one["name"] not in ("versions", "resume") and one["found"] != {}
    )
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2_000_000
    assert os.path.isfile(tmp_path / "results" / "summary.txt")

    def measured(bench: str) -> Any:
        """The results of a benchmark among the checks, which drew its figures, too."""
        folder = tmp_path / "results" / bench
        assert re.search(rf"{bench}.json, \w+\.png$", (folder / "output.txt").read_text(), re.MULTILINE)
        return json.loads((folder / f"{bench}.json").read_text())

    strategies, safety, overhead = map(measured, ("strategies", "safety", "overhead"))
    assert len(strategies["strategies"]) == 5
    assert all(set(causes) == set(CAUSES.values()) for causes in strategies["lost"].values())
    assert set(safety["seconds_per_step"]) == {PLAIN, *AGAINST}
    assert list(safety["ratios"]) == [f"{name} / {other}" for name, other in AGAINST.items()]
    assert "trainer / bare, DDP" in overhead["ratios"]
