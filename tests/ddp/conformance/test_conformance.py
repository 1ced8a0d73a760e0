"""ddp/conformance: the command, on right wrappers and on those that hang, crash or refuse."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

from ddp.conformance import __main__ as conformance
from ddp.conformance.check import CHECKS, Check
from ddp.conformance.report import summary, table
from ddp.conformance.runner import HUNG, PASS, REFUSED, WRONG, Answer, Result, Runner, verdict
from tests.support.launch import run_command
from tests.support.user_errors import UserError

WRAPPERS = "tests.ddp.conformance.wrappers"
FIRST = next(check for check in CHECKS if check.name == "gradients are the average of the ranks")
# Cases in which torch's DDP is wrong, or stricter than it must be.
TORCH_FAILS = {
    "differing shapes are refused by all ranks",  # rank 0 waits for the others, which have raised an error
    "differing dtypes are refused by all ranks",  # rank 0's bytes are read as other numbers
    "equal shapes under other names are refused",  # names are not compared
    "training goes on after an error in the middle of backward",  # every later step is refused
    "a static graph may begin under no sync",  # an internal assertion fails
    "a finished rank uses no parameter",  # a joined rank sends the flags of its own last step
    "each of two forward passes may have its backward pass",  # only the first backward pass averages
    "an optimizer may step within backward",  # makes a torch.Stream, which needs an accelerator
}


@pytest.mark.slow
def test_torch_s_ddp_passes_what_it_should(tmp_path: Path) -> None:
    done = run_command("ddp.conformance", "--output", str(tmp_path), "--time-limit", "5", timeout_s=200)
    results = json.loads((tmp_path / "conformance.json").read_text())["results"]
    failed = {result["check"]: result["message"] for result in results if result["status"] != PASS}
    assert failed.keys() == TORCH_FAILS, failed
    assert done.returncode == 1
    assert f"{len(results) - len(TORCH_FAILS)} of {len(results)} pass" in done.stdout
    assert len(results) >= 20 * len(TORCH_FAILS)  # torch is the measure: at most 5 % are cases in which it is not


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_ours_passes_all_checks(tmp_path: Path, ranks: int) -> None:
    wrapper = "ddp.by_hand:DistributedDataParallel"
    done = run_command("ddp.conformance", wrapper, "--ranks", str(ranks), "--output", str(tmp_path), timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    number = sum(check.at_least <= ranks for check in CHECKS)
    assert len(re.findall(r"^ +pass  \S", done.stdout, re.MULTILINE)) == number
    assert f"{wrapper}: {number} of {number} pass\n" in done.stdout


@pytest.mark.slow
def test_a_failed_check_is_status_1_and_its_reason_stands_beside_it(tmp_path: Path) -> None:
    wrapper = f"{WRAPPERS}:RefusesOnRank1"
    done = run_command("ddp.conformance", wrapper, "--only", FIRST.name, "--output", str(tmp_path), "--ranks", "2,3")
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if FIRST.name in line)
    message = "rank 1: NotImplementedError: not on this rank; rank 0 waited in vain"
    assert line.split(maxsplit=2) == ["refused", "refused", f"{FIRST.name}: {message}"]
    assert "0 of 1 pass: 1 refused" in done.stdout
    assert "Traceback" in json.loads((tmp_path / "conformance.json").read_text())["results"][0]["answers"]["1"]["trace"]


def test_a_rank_that_hangs_is_killed_and_the_next_check_gets_new_ranks() -> None:
    with Runner(2, time_limit_s=1.5) as runner:
        hung = runner.run(FIRST, f"{WRAPPERS}:HangsOnRank1")
        assert (hung.status, hung.message) == (HUNG, "ranks 0 and 1 did not answer within 1.5 s")
        assert runner.run(FIRST, conformance.TORCH).status == PASS


def test_a_rank_that_dies_is_named() -> None:
    with Runner(2) as runner:
        died = runner.run(FIRST, f"{WRAPPERS}:DiesOnRank1")
        assert died.status == REFUSED
        assert re.match(r"rank 1 of 2 \(pid \d+\) ended with exit status 7", died.message)
        assert died.seconds < 10


def test_a_collective_that_is_left_over_is_found() -> None:
    with Runner(2, time_limit_s=3) as runner:
        assert runner.run(FIRST, f"{WRAPPERS}:LeavesACollective").status != PASS


def test_warnings_are_no_failure_and_prints_go_to_the_log(tmp_path: Path) -> None:
    with Runner(2, logs=tmp_path) as runner:
        assert runner.run(FIRST, f"{WRAPPERS}:Talks").status == PASS
    assert (tmp_path / "rank1-of-2.log").read_text() == "a line\n"


def test_the_verdict_prefers_the_cause_to_its_echo() -> None:
    wrong, echo = (
        Answer(WRONG, "gradient 0 is 1 instead of 2"),
        Answer(REFUSED, "RuntimeError: Connection reset by peer"),
    )
    error = Answer(REFUSED, "ValueError: no")
    assert verdict({0: echo, 1: wrong}, 2, 5) == (WRONG, "rank 1: gradient 0 is 1 instead of 2")
    assert verdict({0: echo, 1: error}, 2, 5) == (REFUSED, "rank 1: ValueError: no")
    assert verdict({1: error}, 3, 5) == (REFUSED, "rank 1: ValueError: no; ranks 0 and 2 waited in vain")
    assert verdict({1: Answer(PASS)}, 3, 5) == (HUNG, "ranks 0 and 2 did not answer within 5 s; rank 1 passed")
    assert verdict({0: Answer(PASS), 1: Answer(PASS)}, 2, 5) == (PASS, "")


def test_the_table_fits_and_the_summary_counts_checks() -> None:
    results = [
        Result("one", "averages", 2, PASS),
        Result("one", "averages", 3, WRONG, "a long message " * 20),
        Result("two", "hooks", 3, HUNG, "rank 1 did not answer"),
        Result("three", "hooks", 2, PASS),
    ]
    lines = table(results, 60).splitlines()
    assert max(map(len, lines)) == 60
    assert lines[1].split()[:3] == ["pass", "wrong", "one:"]
    assert lines[4].split()[:3] == ["-", "hung", "two:"]
    assert summary(results) == "1 of 3 pass: 1 wrong, 1 hung"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["ddp.by_hand:NoSuchWrapper"], "has no 'NoSuchWrapper'"),
        (["no_such_module:X"], "No module named 'no_such_module'"),
        (["tests.ddp.conformance.broken_module:X"], "what this module needs is not here"),
        ([f"{WRAPPERS}:NUMBER"], "cannot be called"),
        (["without_a_colon"], "name the wrapper as module:Class"),
        (["--only", "no_such_check"], "--only no_such_check: no check has that in its name"),
        (["--ranks", "1"], "--ranks 1 is out of range"),
    ],
)
def test_a_user_error_is_one_line(user_error: UserError, arguments: list[str], words: str) -> None:
    assert words in user_error(conformance.main, *arguments)


def test_an_error_on_the_ranks_alone_is_one_line(tmp_path: Path) -> None:
    wrapper = f"{WRAPPERS.replace('wrappers', 'only_here')}:Wrapper"
    done = run_command("ddp.conformance", wrapper, "--only", FIRST.name, "--output", str(tmp_path))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "cannot be imported (ImportError: not on a rank" in done.stderr


def test_the_list_has_every_check_and_what_it_proves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ddp.conformance", "--list", "--only", FIRST.topic])
    conformance.main()
    out = capsys.readouterr().out
    assert f"  {FIRST.name}\n      {FIRST.proves.splitlines()[0]}\n" in out


def test_names_are_not_used_twice() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.run.__name__)
def test_a_check_is_short_and_says_what_it_proves(check: Check) -> None:
    assert check.proves
    assert len(inspect.getsource(check.run).splitlines()) <= 30


def test_the_readme_s_table_is_of_the_results() -> None:
    folder = Path(conformance.__file__).parent
    readme = (folder / "README.md").read_text()
    for name in ("torch", "ours", "naive"):
        found = summary(
            [Result(**result) for result in json.loads((folder / f"results/{name}.json").read_text())["results"]]
        )
        numbers = re.match(
            r"(\d+ of \d+) pass(?:: )?(?:(\d+) wrong)?(?:, )?(?:(\d+) refused)?(?:, )?(?:(\d+) hung)?", found
        )
        assert numbers is not None
        assert " | ".join(number or "0" for number in numbers.groups()) in readme, found


def test_a_picture_of_runs(tmp_path: Path) -> None:
    results = Path(conformance.__file__).parent / "results"
    picture = tmp_path / "all.png"
    runs = ",".join(str(results / f"{name}.json") for name in ("torch", "naive"))
    assert run_command("ddp.conformance.figure", "--runs", runs, "--output", str(picture)).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = run_command("ddp.conformance.figure", "--runs", str(tmp_path / "nothing"))
    assert refused.returncode == 2
    assert "nothing is not of ddp.conformance (IsADirectoryError): run it first" in refused.stderr or (
        "nothing is not of ddp.conformance (FileNotFoundError): run it first" in refused.stderr
    )
