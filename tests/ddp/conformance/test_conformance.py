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
from ddp.conformance.runner import HUNG, NOT_OFFERED, PASS, REFUSED, WRONG, Answer, Result, Runner, lacking, verdict
from tests.support.launch import REPOSITORY, run_command, run_forked

WRAPPERS = "tests.ddp.conformance.wrappers"
FIRST = next(check for check in CHECKS if check.name == "gradients are the average of the ranks")


@pytest.mark.slow
def test_torch_s_ddp_passes_all_checks(tmp_path: Path) -> None:
    """torch's DDP passes all checks, at two ranks and at three.

    Claim (ddp/conformance/README.md): torch's DDP passes all checks.
    """
    done = run_command("ddp.conformance", "--output", str(tmp_path), "--ranks", "2,3", timeout_s=280)
    assert f"{len(CHECKS)} of {len(CHECKS)} pass" in done.stdout
    assert done.returncode == 0


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


def test_what_a_wrapper_does_not_offer_is_no_failure(tmp_path: Path) -> None:
    """A check whose option the wrapper lacks is not offered, and the exit status is 0.

    Claim (ddp/conformance/README.md): what a wrapper does not offer is said, and is no failure.
    """
    check = "a list gives each bucket its cap"
    (done,) = run_forked("ddp.conformance", f"{WRAPPERS}:KnowsNoOption", "--only", check, "--output", str(tmp_path))
    assert f"not offered  {check}: rank 0: no option bucket_cap_mb_list; without it: wrong: rank 0:" in done.stdout
    assert "0 of 1 pass: 1 not offered" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    "error, feature",
    [
        (TypeError("MyDDP.__init__() got an unexpected keyword argument 'init_sync'"), "no option init_sync"),
        (AttributeError("'MyDDP' object has no attribute 'no_sync'"), "no method no_sync"),
        (NotImplementedError("join is\nnot offered"), "join is not offered"),
        (AttributeError("'MyDDP' object has no attribute '_buckets'"), None),  # a bug of the wrapper's own
        (ValueError("no"), None),
    ],
)
def test_a_feature_that_is_missing_is_told_from_a_bug(error: Exception, feature: str | None) -> None:
    assert lacking(error) == feature


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
    missing = Answer(NOT_OFFERED, "no option init_sync")
    assert verdict({0: missing, 1: missing}, 2, 5) == (NOT_OFFERED, "rank 0: no option init_sync")
    assert verdict({0: missing, 1: Answer(PASS)}, 2, 5) == (REFUSED, "rank 0: no option init_sync")
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


README = Path(conformance.__file__).with_name("README.md").read_text()
RECORD = (REPOSITORY / "results/cpu/conformance.txt").read_text()


def test_the_readme_s_table_is_of_the_record() -> None:
    """The README has the last line of each run in the record, and the number of checks.

    Claim (ddp/conformance/README.md): the table is of the record of a measurement.
    """
    summaries = re.findall(r"^(\S+:\w+): (\d+ of (\d+) pass.*)$", RECORD, re.MULTILINE)
    assert len(summaries) == 3
    for wrapper, counts, checks in summaries:
        row = next(line for line in README.splitlines() if line.startswith("|") and wrapper.rpartition(":")[2] in line)
        assert counts in row
        assert int(checks) == len(CHECKS)
    assert f"{len(CHECKS)} checks" in README
