"""The names of findings: each is explained and listed, and what a user ignores is left out."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import pytest

import ddp.audit
from common.errors import UsageError
from common.foreign_script.run import Outcome
from ddp.audit.finding import KINDS, PAGE, Finding
from ddp.audit.judged import judged
from ddp.audit.names import explain, is_ignored
from ddp.audit.vary import KINDS as WAYS
from ddp.audit.watch.event_types import Event
from ddp.museum.__main__ import FOLDER, exhibits
from tests.ddp.audit import scripts
from tests.ddp.audit.forked import watch
from tests.support.launch import REPOSITORY, run_command

PR_GET_CHILD_SUBREAPER = 37  # see prctl(2)
EXHIBIT = FOLDER / "gradients" / "loss_not_divided.py"
LINE = next(n for n, line in enumerate(EXHIBIT.read_text().splitlines(), 1) if "# audit: " in line)


def finding(path: Path, line: int = 1) -> Finding:
    return Finding("same-order", Event(where=f"{path}:{line}", step=3), "100 %: the same,\nagain", 0)


def test_each_name_of_a_finding_is_explained_and_each_explained_one_is_found() -> None:
    """The names are the words with hyphens in the code of the detectors, and those of the ways to run again."""
    assert len(re.findall("^### ", PAGE.read_text(), re.MULTILINE)) == len(KINDS)
    strings = {
        node.value
        for file in REPOSITORY.glob("ddp/audit/detectors/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    found = {one for one in strings if re.fullmatch("[a-z]+(-[a-z]+)+", one)}
    assert found | {f"vary-{way}" for way in WAYS} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_a_name_is_explained(name: str) -> None:
    kind = KINDS[name]
    what, how, cure, *stories = explain(name).split("\n\n")
    assert what == f"{name}: {kind.what}"
    assert re.fullmatch(r"How it is seen: It [^\[*]+\.", how)
    assert cure == f"What to do: {kind.cure}. See {REPOSITORY / kind.chapter}"
    assert (REPOSITORY / kind.chapter.partition(",")[0]).is_file()
    exhibit = name.replace("-", "_")
    if exhibit in exhibits():
        assert f"`raw-ddp museum {exhibit}`" in stories[0]
        assert re.search(r"\w/\w+.*#\d+", stories[-1])


def test_the_command_explains() -> None:
    done = run_command("ddp.audit", "--explain", "same-order")
    assert done.stdout == explain("same-order") + "\n"
    unknown = run_command("ddp.audit", "--explain=same-oder")
    assert unknown.returncode == 2
    assert unknown.stderr == (
        "error: same-oder: there is no finding of this name; the nearest ones are same-order, same-noise, same-dropout\n"
    )


def test_an_unknown_name_is_not_ignored(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1  # audit: ignore[same-order, x]\n")
    for arguments, said in (
        (("--ignore", "same-order,y:script.py", "--", EXHIBIT), "error: y: there is no finding"),
        (("--", script), "error: x: there is no finding"),
    ):
        done = run_command("ddp.audit", *map(str, arguments))
        assert (done.returncode, done.stderr.startswith(said)) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("ignore", "is_left_out"),
    [
        ("same-order", True),
        ("same-order:train.py", True),
        ("same-order:job/train.py:2", True),
        ("same-order:train.py:1", False),
        ("same-order:rain.py", False),
        ("same-noise", False),
    ],
)
def test_findings_are_left_out_by_a_flag(tmp_path: Path, ignore: str, is_left_out: bool) -> None:
    assert is_ignored(finding(tmp_path / "job" / "train.py", 2), [ignore]) == is_left_out


def test_findings_are_left_out_by_a_comment(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("a  # audit: ignore[same-order]\nb  # audit: ignore[same-noise, same-order]\nc  # same-order\n")
    assert [is_ignored(finding(path, line), []) for line in (1, 2, 3)] == [True, True, False]


def test_an_annotation_is_escaped_as_github_demands(tmp_path: Path) -> None:
    assert finding(tmp_path / "a:b,c.py").as_annotation() == (
        f"::error file={tmp_path}/a%3Ab%2Cc.py,line=1,title=same-order::100 %25: the same,%0Aagain (rank 0, step 3). "
        f"{KINDS['same-order'].cure}. See raw-ddp audit --explain same-order"
    )


@pytest.mark.examples
def test_a_check_in_a_test_raises_with_the_findings() -> None:
    with pytest.raises(AssertionError, match=rf"loss_not_divided.py:{LINE}: loss-not-divided: the loss is not divided"):
        ddp.audit.check(EXHIBIT)
    ddp.audit.check(EXHIBIT, "--right", timeout=100.0)
    ddp.audit.check(EXHIBIT, ignore=("loss-not-divided",))
    with pytest.raises(UsageError, match="ran on one rank"):
        ddp.audit.check(EXHIBIT, ranks=1)
    adopts = ctypes.c_int(1)
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    assert not adopts.value  # other tests' orphans are not this process's


@pytest.mark.examples
def test_what_is_ignored_is_counted() -> None:
    github = ("--once", "--format", "github", "--", str(EXHIBIT))
    done = run_command("ddp.audit", "--ignore", f"loss-not-divided:{EXHIBIT.name}:{LINE}", *github)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("wrong: 0, ignored: 1\n")
    done = run_command("ddp.audit", *github)
    assert done.returncode == 1
    assert f",line={LINE},title=loss-not-divided::the loss is not divided" in done.stdout
    assert done.stdout.endswith("wrong: 1\n")


@pytest.mark.examples
def test_steps_that_cannot_be_judged_are_named(tmp_path: Path) -> None:
    """By all detectors, or by one; nothing is said of a script in which each judged a step. What was looked at is named."""
    of_ranks = "averages, weights, replicas, schedules"
    for name, said, seen in (
        ("JOINS", [f"{of_ranks}: 0 of 6 steps, DDP joins uneven ranks"], "optimizers 6 steps"),
        (
            "CLOSURES",
            [f"{of_ranks}, optimizers: 0 of 2 steps, the optimizer calls its closure"],
            "randomness 40 forward passes",
        ),
        ("SHARDED", ["averages, replicas: 0 of 3 steps, the parameters are sharded"], "weights 3 steps, schedules 3"),
        ("OWN_LOSS", ["weights: 0 of 3 steps, no loss of torch.nn.functional was seen"], "averages 3 steps, replicas"),
        ("COMMON", [], "averages "),
    ):
        path = tmp_path / "script.py"
        path.write_text(getattr(scripts, name))
        why, lines, looked_at = judged(watch(tmp_path, [str(path)]), Outcome(0, 0.0, [], ""))
        assert why is None
        assert lines == said
        assert seen in looked_at
