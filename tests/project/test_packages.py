"""The packages' names beside a project's own: a ``common`` that comes first on Python's path is an error that says so."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY, run_program

SUBJECTS = ("dataloading", "dataparallel", "ddp")


def import_in(folder: Path, module: str, *, first: Path = Path(".")) -> subprocess.CompletedProcess[str]:
    """Import a module in a fresh interpreter, as ``python -m`` would: ``first`` comes before this repository."""
    program = f"import sys; sys.path[:0] = [{str(first)!r}, {str(REPOSITORY)!r}]; import {module}"
    return run_program(program, cwd=folder, env={"PYTHONPATH": ""})


@pytest.mark.parametrize(
    "files",
    [["common/__init__.py", "common/signals.py"], ["common.py"]],
    ids=["package", "module"],
)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_common_of_ones_own_is_named_with_what_to_do(subject: str, files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    done = import_in(tmp_path, subject)
    assert done.returncode == 1
    assert 'Not found: another "common" comes first, rename it' in done.stderr
    assert re.match(r"(ModuleNotFoundError|ImportError): .*'common", done.stderr.splitlines()[-1])


def test_a_folder_without_code_and_a_common_that_comes_later_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()  # Python prefers a package that has an __init__.py, wherever it is
    (tmp_path / "common" / "notes.txt").write_text("")
    assert import_in(tmp_path, "ddp, common.errors").stderr == ""
    (tmp_path / "common" / "__init__.py").write_text("")
    assert import_in(tmp_path, "ddp, common.errors", first=REPOSITORY).stderr == ""
