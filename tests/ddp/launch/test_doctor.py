"""ddp/launch/doctor.py: what is wrong comes first, then the ranks, then how they reach each other."""

from __future__ import annotations

import re

from ddp.launch.doctor import Facts, first_ranks, wrong_clocks
from tests.support.launch import error_lines, free_port, run_command

FACTS: Facts = {"host": "host1", "interface": "eth0 (10.0.0.1)", "clock": "+0.0 s"}


def test_one_process_is_a_job_of_its_own() -> None:
    done = run_command("ddp.launch.doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nothing is wrong\nstarted by no launcher: one process by itself: 1 rank on 1 host,")


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


def test_hosts_are_measured_and_on_one_host_its_ranks() -> None:
    other = {**FACTS, "host": "host2"}
    assert first_ranks([FACTS, FACTS, other, other]) == {"host1 (rank 0)": 0, "host2 (rank 2)": 2}
    assert first_ranks([FACTS, FACTS]) == {"rank 0": 0, "rank 1": 1}
