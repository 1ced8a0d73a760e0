"""ddp/launch/doctor.py: what is wrong comes first, then the ranks, then how they reach each other."""

from __future__ import annotations

import re

from common.distributed.agreement import GPU, GPU_KIND
from ddp.launch.doctor import Facts, first_ranks, what_is_wrong
from tests.support.launch import free_port, run_command

FACTS: Facts = {"host": "host1", "interface": "eth0 (10.0.0.1)", "clock": "+0.0 s", "the version of torch": "2.14.1"}


def test_one_process_is_a_job_of_its_own() -> None:
    done = run_command("ddp.launch.doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "nothing is wrong\nstarted by no launcher: one process by itself: 1 of 1 ranks on 1 host,"
    )


def test_a_rank_that_is_missing_comes_first() -> None:
    job = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    done = run_command("ddp.launch.doctor", "--timeout", "1", env={**job, **meeting})
    assert done.returncode == 1
    first, second, *_ = done.stdout.splitlines()
    assert re.match(r"wrong: 1 of 3 ranks came, from \S+\. Not rank 1, 2: start the others, and check", first)
    assert re.match(r"started by variables set by hand: 1 of 3 ranks on 1 host, which meet at localhost:\d+", second)


def test_versions_and_clocks_that_differ_are_named() -> None:
    everyone = {0: FACTS, 1: {**FACTS, "host": "host2", "the version of torch": "1.13.1"}}
    assert what_is_wrong(everyone, 2) == ["the version of torch is 2.14.1 on rank 0, but 1.13.1 on rank 1"]
    assert what_is_wrong({0: FACTS, 1: {**FACTS, "pid": "2", "clock": "-59.0 s"}}, 2) == []
    (line,) = what_is_wrong({0: FACTS, 1: {**FACTS, "host": "host2", "clock": "-300.2 s"}}, 2)
    assert line == "the clock of host2 (rank 1) differs by -300.2 s from that of rank 0"


def test_a_gpu_that_two_ranks_would_share_is_named() -> None:
    gpu = {GPU: "H100 GPU-1 of host1", GPU_KIND: "H100"}
    (line,) = what_is_wrong({0: {**FACTS, **gpu}, 1: {**FACTS, **gpu}}, 2)
    assert line.startswith("ranks 0 and 1 have the same GPU, H100 GPU-1 of host1, and NCCL needs one for each: ")
    assert what_is_wrong({0: {**FACTS, **gpu}, 1: {**FACTS, **gpu, GPU: "H100 GPU-2 of host1"}}, 2) == []


def test_hosts_are_measured_and_on_one_host_its_ranks() -> None:
    other = {**FACTS, "host": "host2"}
    assert first_ranks({0: FACTS, 1: FACTS, 2: other, 3: other}) == {"host1 (rank 0)": 0, "host2 (rank 2)": 2}
    assert first_ranks({0: FACTS, 1: FACTS}) == {"rank 0": 0, "rank 1": 1}
