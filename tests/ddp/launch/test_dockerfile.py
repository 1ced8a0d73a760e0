"""ddp/launch/Dockerfile: what it copies exists, and it keeps the rules that its comments promise. No image is built here: hadolint,
a linter for Dockerfiles, reads it where it is installed."""

from __future__ import annotations

import configparser
import fnmatch
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import REPOSITORY

DOCKERFILE = REPOSITORY / "ddp" / "launch" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its arguments, without comments, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    parsed = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = line.partition(" ")
        parsed.append((name, " ".join(arguments.split())))
    return parsed


def arguments_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def copied() -> list[str]:
    return [source for arguments in arguments_of("COPY") for source in arguments.split()[:-1]]


def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def test_it_copies_the_packages_of_setup_cfg_and_they_exist() -> None:
    packages = [pattern.rstrip("*") for pattern in setup()["options.packages.find"]["include"].split()]
    assert sorted(copied()) == sorted(["setup.cfg", "pyproject.toml", *packages])
    assert all((REPOSITORY / source).exists() for source in copied())


def test_the_builder_gets_what_is_copied() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().split("\n")
    ignored = [line for line in lines if line and not line.startswith("#")]
    assert not [(source, pattern) for source in copied() for pattern in ignored if fnmatch.fnmatch(source, pattern)]
    for large in (".git", ".venv", "runs", "data"):
        assert large in ignored


def test_a_change_of_the_code_does_not_install_torch_again() -> None:
    lines = instructions()
    installs = [
        number for number, (name, arguments) in enumerate(lines) if name == "RUN" and "pip install" in arguments
    ]
    before = " ".join(arguments for name, arguments in lines[: installs[0]] if name == "COPY")
    assert before == "setup.cfg pyproject.toml ./"
    assert all("--no-deps" in lines[number][1] for number in installs[1:])


def test_the_base_is_a_python_that_setup_cfg_takes_with_a_pinned_minor_version() -> None:
    (base,) = arguments_of("FROM")
    version = re.fullmatch(r"python:(\d+)\.(\d+)(\.\d+)?-slim-\w+", base)
    assert version, base
    least = setup()["options"]["python_requires"].removeprefix(">=").split(".")
    assert (int(version[1]), int(version[2])) >= (int(least[0]), int(least[1]))


def test_it_ends_as_a_user_without_rights_and_starts_nothing() -> None:
    user = arguments_of("USER")[-1]
    assert user.isdecimal(), "Kubernetes' runAsNonRoot cannot look up a name"
    assert any(f"--uid {user} " in arguments for arguments in arguments_of("RUN"))
    assert int(user) > 0
    assert not arguments_of("CMD")
    assert not arguments_of("ENTRYPOINT")


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("needs hadolint, of the extra 'kubernetes'")
    done = subprocess.run([program, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
