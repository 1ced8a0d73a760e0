"""ddp/conformance: the command, on right wrappers and on those that hang, crash or refuse."""

from __future__ import annotations

import csv
import inspect
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from ddp.conformance import __main__ as conformance
from ddp.conformance.check import CHECKS, Check
from ddp.conformance.report import summary, table, worst, write_json
from ddp.conformance.runner import HUNG, PASS, REFUSED, WRONG, Answer, Result, Runner, verdict
from tests.support.launch import run_command, run_forked
from tests.support.user_errors import UserError

WRAPPERS, MUTANTS = "tests.ddp.conformance.wrappers", "tests.ddp.conformance.mutants"
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
    """torch's DDP passes all checks but those that the page names.

    Claim (ddp/conformance/README.md): torch's DDP passes 95 % of them.
    """
    done = run_command("ddp.conformance", "--output", str(tmp_path), "--time-limit", "5", timeout_s=200)
    results = json.loads((tmp_path / "conformance.json").read_text())["results"]
    failed = {result["check"]: result["message"] for result in results if result["status"] != PASS}
    assert failed.keys() == TORCH_FAILS, failed
    assert done.returncode == 1
    assert f"{len(results) - len(TORCH_FAILS)} of {len(results)} pass" in done.stdout
    assert len(results) >= 20 * len(TORCH_FAILS)  # torch is the measure: at most 5 % are cases in which it is not


def test_a_failed_check_is_status_1_and_its_reason_stands_beside_it(tmp_path: Path) -> None:
    wrapper = f"{WRAPPERS}:RefusesOnRank1"
    (done,) = run_forked("ddp.conformance", wrapper, "--only", FIRST.name, "--output", str(tmp_path), "--ranks", "2,3")
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if FIRST.name in line)
    message = "rank 1: ValueError: not on this rank; rank 0 waited in vain"
    assert line.split(maxsplit=2) == ["refused", "refused", f"{FIRST.name}: {message}"]
    assert "0 of 1 pass: 1 refused" in done.stdout
    assert "Traceback" in json.loads((tmp_path / "conformance.json").read_text())["results"][0]["answers"]["1"]["trace"]


def test_a_wrapper_that_averages_nothing_is_told_so_in_one_line(tmp_path: Path) -> None:
    (done,) = run_forked("ddp.conformance", f"{WRAPPERS}:AveragesNothing", "--output", str(tmp_path))
    assert "this is the rank's own, nothing was averaged" in done.stdout
    assert f"0 of 1 pass: 1 wrong; {len(CHECKS) - 1} more build on the first, and were not run" in done.stdout


@pytest.mark.parametrize(
    "check, wrapper, words",
    [
        (
            FIRST.name,
            "tests.ddp.conformance.mutants:gradients_are_the_average_of_the_ranks",
            "this is the sum over the ranks, not their average",
        ),
        (FIRST.name, f"{WRAPPERS}:Asserts", "wrappers.py:"),
        (
            "gradients may be views of the buckets",
            f"{WRAPPERS}:KnowsNoOption",
            "as_bucket_view; without it: wrong: rank",
        ),
        ("accumulation works with gradients as views", f"{WRAPPERS}:KnowsNoOption", "; without it: pass"),
    ],
)
def test_a_message_says_where_to_look(check: str, wrapper: str, words: str) -> None:
    with Runner(2) as runner:
        assert words in runner.run(next(one for one in CHECKS if one.name == check), wrapper).message


def test_a_rank_that_hangs_is_killed_and_the_next_check_gets_new_ranks() -> None:
    """A rank that hangs is killed and the next check gets new ranks.

    Claim (ddp/conformance/README.md): what hangs is killed, and its ranks are named.
    """
    with Runner(2, time_limit_s=1.5) as runner:
        hung = runner.run(FIRST, f"{WRAPPERS}:HangsOnRank1")
        assert (hung.status, hung.message) == (HUNG, "ranks 0 and 1 did not answer within 1.5 s")
        assert runner.run(FIRST, conformance.TORCH).status == PASS


def test_a_rank_that_dies_is_named() -> None:
    """A rank that dies is named.

    Claim (ddp/conformance/README.md): a rank that dies is named; a collective that is left over is found.
    """
    with Runner(2) as runner:
        died = runner.run(FIRST, f"{WRAPPERS}:DiesOnRank1")
        assert died.status == REFUSED
        assert re.match(r"rank 1 of 2 \(pid \d+\) ended with exit status 7", died.message)
        assert died.seconds < 10


def test_a_collective_that_is_left_over_is_found() -> None:
    """A collective that is left over is found.

    Claim (ddp/conformance/README.md): a rank that dies is named; a collective that is left over is found.
    """
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
    assert summary(worst(results).values()) == "1 of 3 pass: 1 wrong, 1 hung"


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
        (["--compare", "no/such/run"], "no/such/run is not of ddp.conformance (FileNotFoundError): run it first"),
    ],
)
def test_a_user_error_is_one_line(user_error: UserError, arguments: list[str], words: str) -> None:
    assert words in user_error(conformance.main, *arguments)


def test_an_error_on_the_ranks_alone_is_one_line(user_error: UserError, tmp_path: Path) -> None:
    wrapper = f"{WRAPPERS.replace('wrappers', 'only_here')}:Wrapper"
    message = user_error(conformance.main, wrapper, "--only", FIRST.name, "--output", tmp_path)
    assert "cannot be imported (ImportError: not on a rank" in message


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


RESULTS = Path(conformance.__file__).parent / "results/conformance.csv"


def test_the_readme_s_table_is_of_the_results() -> None:
    """The README's table is that of the results in JSON.

    Claim (ddp/conformance/README.md): the table is of the results, which can be drawn.
    """
    readme = RESULTS.parent.with_name("README.md").read_text()
    rows = list(csv.DictReader(RESULTS.read_text().splitlines()))
    assert [(row["topic"], row["check"]) for row in rows] == [(check.topic, check.name) for check in CHECKS]
    for wrapper in list(rows[0])[2:]:
        counts = Counter(row[wrapper] for row in rows)
        numbers = f"{counts[PASS]} of {len(rows)} | {counts[WRONG]} | {counts[REFUSED]} | {counts[HUNG]} |"
        assert any(numbers in line for line in readme.splitlines() if wrapper.partition(":")[2] in line), numbers


def test_runs_are_compared_in_a_table_and_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table and a picture compare the results of several runs.

    Claim (ddp/conformance/README.md): the table is of the results, which can be drawn.
    """
    statuses = {"one": (PASS, WRONG), "two": (REFUSED, PASS)}
    for wrapper, of_ranks in statuses.items():
        results = [Result("a check", "averages", ranks, status) for ranks, status in enumerate(of_ranks, 2)]
        (tmp_path / wrapper).mkdir()
        write_json(tmp_path / wrapper, {"wrapper": wrapper}, results)
    runs = ",".join(str(tmp_path / wrapper) for wrapper in statuses)
    monkeypatch.setattr("sys.argv", ["ddp.conformance", "--compare", runs, "--output", str(tmp_path)])
    conformance.main()
    assert (tmp_path / "conformance.csv").read_text() == "topic,check,one,two\naverages,a check,wrong,refused\n"
    assert (tmp_path / "conformance.png").is_file()
