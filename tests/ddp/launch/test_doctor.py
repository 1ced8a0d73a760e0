"""ddp/launch/doctor.py: what is wrong comes first, then the ranks, then how they reach each other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from common.distributed.dist_env import DistEnv
from ddp.launch import doctor
from ddp.launch.doctor import Facts, first_ranks, wrong_clocks
from tests.support.launch import error_lines, free_port, run_command

FACTS: Facts = {"host": "host1", "interface": "eth0 (10.0.0.1)", "clock": "+0.0 s"}


def test_one_process_is_a_job_of_its_own() -> None:
    done = run_command("ddp.launch.doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nothing is wrong\nstarted by no launcher: one process by itself: 1 rank on 1 host,")


@pytest.mark.faults
def test_a_rank_that_is_missing_is_one_line_as_in_ddp_train() -> None:
    job = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    done = run_command("ddp.launch.doctor", "--timeout", "1", env={**job, **meeting})
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = error_lines(done.stderr)
    assert re.search(r"ranks \[1, 2\] did not come, 1 of 3 did, from \S+: start the others, and check", line)


def test_clocks_that_differ_are_named() -> None:
    assert wrong_clocks([FACTS, {**FACTS, "clock": "-59.0 s"}]) == []
    (line,) = wrong_clocks([FACTS, {**FACTS, "host": "host2", "clock": "-300.2 s"}])
    assert line == "wrong: the clock of host2 (rank 1) differs by -300.2 s from that of rank 0"


def test_what_a_host_lacks_and_a_run_directory_that_it_does_not_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "LEAST_GB", 1e9)
    monkeypatch.setattr(doctor, "LEAST_FILES", 10**9)
    monkeypatch.setattr(doctor, "MOST_LOOKUP_S", 0)
    store = HashStore()
    store.set("doctor/shown/0", "null")
    store.set("doctor/found/0", "[]")
    rank_1 = replace(DistEnv.alone(torch.device("cpu")), rank=1, world_size=2)
    everyone = [{**FACTS, "pid": "1"}, {**FACTS, "pid": "2", "host": "host2"}]
    lines = doctor.wrong_hosts(everyone, store, rank_1, tmp_path / "runs")
    words = (
        r"\d GB free for runs",
        r"GB free in /dev/shm",
        r"open \d+ files",
        r"takes \d s to find the name of an address",
        f"does not see what rank 0 writes to {tmp_path}",
    )
    for line, word in zip(lines, words, strict=True):
        assert line.startswith("wrong: host2 ") and re.search(word, line)


def test_hosts_are_measured_and_on_one_host_its_ranks() -> None:
    other = {**FACTS, "host": "host2"}
    assert first_ranks([FACTS, FACTS, other, other]) == {"host1 (rank 0)": 0, "host2 (rank 2)": 2}
    assert first_ranks([FACTS, FACTS]) == {"rank 0": 0, "rank 1": 1}
