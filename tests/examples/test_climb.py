"""examples/climb/: each file is a few lines from the one before it, and comes to the same numbers where it must.

``python -m tests.examples.test_climb`` writes the diffs into examples/climb/README.md.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import itertools
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ddp.audit.forked import judge, watch
from tests.support.launch import REPOSITORY, run_ranks

FOLDER = REPOSITORY / "examples" / "climb"
BASE, *STEPS = FILES = sorted(FOLDER.glob("[0-9]_*.py"))
README = FOLDER / "README.md"
BLOCK = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HUNK = re.compile(r"^@@ -(\d+)(,\d+)? \S+ @@\n((?:[-+].*\n)*)", re.MULTILINE)
MOST_LINES_OF_THE_BASE, MOST_LINES_OF_A_DIFF = 60, 12
# Errors that a step leaves, and that the next one ends.
LEFT_WRONG = {"1_ranks": ["576 of 576 samples arrive on every rank in epoch 0: the loader does not divide them"]}


def diff(before: Path, after: Path) -> list[str]:
    was, becomes = (path.read_text().splitlines(keepends=True) for path in (before, after))
    return list(difflib.unified_diff(was, becomes, n=0))[2:]  # without the two files' names


def rewritten(text: str) -> str:
    """The page with the diffs of the files as they are now."""
    diffs = iter([f"```diff\n{''.join(diff(*pair))}```" for pair in itertools.pairwise(FILES)])
    return BLOCK.sub(lambda _: next(diffs), text)


def run(folder: Path, path: Path, ranks: int = 2) -> list[str]:
    """The lines that rank 0 prints; steps that save do so in ``folder``, in which ``RANK`` is each rank's own."""
    lines: list[str]
    lines, *others = run_ranks(_run, ranks, str(path), str(folder / f"{path.stem}.pt"), fresh=True)
    assert others == [[]] * (ranks - 1)
    return lines


def _run(*arguments: str) -> list[str]:
    sys.argv = [argument.replace("RANK", os.environ["RANK"]) for argument in arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(arguments[0], run_name="__main__")
    return output.getvalue().splitlines()


def numbers(lines: list[str]) -> list[float]:
    """Loss and accuracy of each epoch."""
    return [float(number) for line in lines for number in re.findall(r"[\d.]+", line)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of the files that ``printed`` has run."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def printed(undisturbed: Path) -> dict[str, list[str]]:
    """The output of each file, the first in one process and the others on two ranks."""
    return {path.stem: run(undisturbed, path, ranks=1 if path == BASE else 2) for path in FILES}


def test_each_file_is_the_one_before_with_the_page_s_diff() -> None:
    """The first file has at most 60 lines. Each diff of the page adds at most 12 and removes at most 12, and makes the next file."""
    assert len(BASE.read_text().splitlines()) <= MOST_LINES_OF_THE_BASE
    page = README.read_text()
    assert page == rewritten(page)
    blocks = BLOCK.findall(page)
    assert len(blocks) == len(STEPS) == 8
    lines = BASE.read_text().splitlines()
    for block, path in zip(blocks, STEPS, strict=True):
        changed = [line[0] for line in block.splitlines()]
        assert max(changed.count("+"), changed.count("-")) <= MOST_LINES_OF_A_DIFF, path.name
        for start, count, hunk in reversed(HUNK.findall(block)):
            first = int(start) - (count != ",0")  # a hunk that only adds names the line before it
            removed, added = ([line[1:] for line in hunk.splitlines() if line[0] == sign] for sign in "-+")
            assert lines[first : first + len(removed)] == removed
            lines[first : first + len(removed)] = added
        assert lines == path.read_text().splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_needs_only_torch_and_names_its_command(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert f" examples/climb/{path.name}" in (ast.get_docstring(tree) or "")
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {"torch", "contextlib", "os", "sys"}


@pytest.mark.examples
def test_the_steps_come_to_the_numbers_of_one_process(printed: dict[str, list[str]], tmp_path: Path) -> None:
    """Up to accumulation, all print what one process prints, on three ranks too; fp16 comes close, and clipping does not."""
    one = printed["0_one_process"]
    assert run(tmp_path, FOLDER / "1_ranks.py", ranks=1) == one == printed["1_ranks"]
    on_three = run(tmp_path, FOLDER / "4_accumulation.py", ranks=3)
    for lines in (printed["2_sampler"], printed["3_evaluation"], printed["4_accumulation"], on_three):
        assert numbers(lines) == pytest.approx(numbers(one), rel=1e-3)
    assert numbers(printed["5_mixed_precision"]) == pytest.approx(numbers(one), rel=2e-2)
    assert numbers(printed["6_clipping"]) != pytest.approx(numbers(one), rel=2e-2)
    assert printed["7_checkpoint"] == printed["6_clipping"]
    assert numbers(printed["8_sharded"]) == pytest.approx(numbers(printed["7_checkpoint"]), rel=2e-3)


@pytest.mark.examples
def test_the_page_shows_what_they_print(printed: dict[str, list[str]]) -> None:
    page = README.read_text()
    for name, lines in printed.items():
        shown = re.search(rf"\({name}\.py\)[^\n]*\n?[^\n]*`(epoch 4: [^`]+)`", page)
        assert shown is not None, name
        assert numbers([shown[1]]) == pytest.approx(numbers(lines[-1:]), rel=1e-2)


@pytest.mark.examples
@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.stem)
def test_the_audit_finds_what_a_step_leaves_wrong_and_nothing_else(path: Path, tmp_path: Path) -> None:
    found = [finding.text for finding in judge(tmp_path, path, tmp_path / "climb.pt")]
    assert found == LEFT_WRONG.get(path.stem, [])


@pytest.mark.examples
@pytest.mark.parametrize("name", ["7_checkpoint", "8_sharded"])
def test_killed_and_started_again_it_ends_with_the_same_bits(
    name: str, printed: dict[str, list[str]], undisturbed: Path, tmp_path: Path
) -> None:
    """Weights, momentum and scale are those of an undisturbed run; on one rank it continues, too, up to rounding; and on two hosts
    of which one has the file."""
    path, checkpoint = FOLDER / f"{name}.py", tmp_path / f"{name}.pt"
    watch(tmp_path, [str(path), str(checkpoint)], kill_at=31)  # in the third epoch of twelve steps
    killed = shutil.copy(checkpoint, tmp_path / "killed")
    assert run(tmp_path, path) == printed[name][2:]
    resumed, whole = (_tensors(torch.load(folder / checkpoint.name)) for folder in (tmp_path, undisturbed))
    assert len(resumed) > 8  # the weights and their momentum
    assert [torch.equal(*pair) for pair in zip(resumed, whole, strict=True)] == [True] * len(resumed)
    shutil.copy(killed, checkpoint)
    assert numbers(run(tmp_path, path, ranks=1)) == pytest.approx(numbers(printed[name][2:]), rel=2e-3)
    for rank in "01":
        (tmp_path / rank).mkdir()
    shutil.copy(killed, tmp_path / "0" / checkpoint.name)
    assert run(tmp_path / "RANK", path) == printed[name][2:]


def _tensors(state: Any) -> list[torch.Tensor]:
    """All tensors and numbers of a checkpoint, in its order."""
    if isinstance(state, dict):
        state = state.values()
    elif not isinstance(state, tuple | list):
        return [torch.as_tensor(state)] if isinstance(state, torch.Tensor | int | float) else []
    return [tensor for value in state for tensor in _tensors(value)]


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
