"""ddp/resilience/resume.py: a job that torchrun starts again continues what it has saved, whatever its command line says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import UsageError
from common.files.atomic_files import write_json
from common.files.run_directory import LAUNCH_FILE
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.resilience.resume import agents_of, is_restart, open_run
from tests.ddp.jobs import small
from tests.ddp.resilience.test_resume import NEWER, SETTINGS, save
from tests.support.launch import run_ranks


def own_agents(below_torchrun: list[bool]) -> tuple[list[str], int]:
    """The agents, when torchrun has started these ranks; and the process that has started this one."""
    with process_group(threads=1) as env:
        if below_torchrun[env.rank]:
            os.environ["TORCHELASTIC_RUN_ID"] = "none"
        return agents_of(env), os.getppid()


def test_an_agent_is_known_by_its_process_and_when_that_began() -> None:
    for agents, parent in run_ranks(own_agents, 2, [True, True]):
        (agent,) = agents  # one for both
        assert re.search(rf", process {parent} since \d+$", agent)
    for agents, _ in run_ranks(own_agents, 2, [False, True]):
        assert len(agents) == 1  # all ranks know of it
    for agents, _ in run_ranks(own_agents, 2, [False, False]):
        assert agents == []


def test_any_agent_that_was_there_before_makes_a_restart(tmp_path: Path) -> None:
    assert not is_restart(tmp_path, ["a"])
    write_json(tmp_path / LAUNCH_FILE, ["a", "b"])
    for agents, expected in ((["a", "b"], True), (["b"], True), (["b", "c"], True), (["c"], False), ([], False)):
        assert is_restart(tmp_path, agents) is expected
    write_json(tmp_path / LAUNCH_FILE, ["c"])  # only the last start counts
    assert not is_restart(tmp_path, ["a"])
    write_json(tmp_path / LAUNCH_FILE, [])
    assert not is_restart(tmp_path, [])


@pytest.mark.parametrize("content", [b'["a"', b"{}"])
def test_a_damaged_record_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LAUNCH_FILE).write_bytes(content)
    assert not is_restart(tmp_path, ["a"])


STARTS: list[tuple[dict[str, Any], bool]] = [  # each with its flags, and whether it saves something
    ({"overwrite": True}, False),
    ({"overwrite": True}, True),
    ({"resume": True}, False),
    ({}, False),
]


def started_again(run_dir: Path) -> list[str | None]:
    """The findings of each of :data:`STARTS`, of ranks that torchrun has started."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    with process_group(threads=1) as env:
        found = []
        for settings, saves in STARTS:
            config = small(**SETTINGS, **settings, run_dir=run_dir)
            try:
                with open_run(config, env, load_data(config, env)) as checkpoint:
                    found.append(checkpoint.path.name if checkpoint else None)
                    if saves and env.is_main:
                        save(run_dir)
            except UsageError as error:
                found.append(str(error))
        return found


def test_torchrun_s_second_start_neither_deletes_nor_refuses_anything(tmp_path: Path) -> None:
    """Not even with ``--overwrite``, or with nothing at all; and no checkpoint is no mistake, whatever was asked for.

    Claim (ddp/resilience/README.md): torchrun's second start neither deletes nor refuses anything.
    """
    run_dir = tmp_path / "run"
    for found in run_ranks(started_again, 2, run_dir):
        assert found == [None, None, NEWER, NEWER]
