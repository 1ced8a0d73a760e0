"""common/reporting/provenance.py: the versions, the commit and the command of a result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from common.machine import usable_cores
from common.reporting import provenance
from common.reporting.provenance import describe_machine, git_commit
from tests.support.launch import REPOSITORY


def test_the_description_names_the_versions_and_the_command_and_is_json() -> None:
    description = json.loads(json.dumps(describe_machine()))
    for package in ("torch", "torchvision", "pillow", "numpy", "matplotlib"):
        assert description[package] == metadata.version(package)
    assert description["python"] == ".".join(map(str, sys.version_info[:3]))
    assert description["usable_cores"] == usable_cores()
    assert description["command"] == " ".join(sys.orig_argv)
    assert description["processor"]


@pytest.mark.skipif(
    not (shutil.which("git") and (REPOSITORY / ".git").exists()), reason="needs git and a checkout of this repository"
)
def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    commit = git_commit()
    assert commit is not None
    assert head.startswith(commit.removesuffix("-dirty"))
    assert len(commit.removesuffix("-dirty")) == 12


def test_outside_a_checkout_or_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "__file__", str(tmp_path / "provenance.py"))
        patch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        assert git_commit() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit() is None
