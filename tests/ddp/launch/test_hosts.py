"""tests/support/harm/network.py: two hosts on one machine, and jobs that run over both."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ddp.across_hosts import digests_as_if
from tests.support.harm.kill import JOB, wait_for_step
from tests.support.harm.left import differences
from tests.support.harm.network import NEW_STORES, TwoHosts
from tests.support.launch import run_ranks

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_over_two_hosts_comes_to_the_bits_of_one(tmp_path: Path, hosts: TwoHosts, ranks: int) -> None:
    """With each strategy and all-reduce, a job over two hosts ends with the bits of one host.

    With torch's DDP, and with the hand-written ones and every all-reduce.

    Claim (ddp/README.md, 2): over two hosts, each strategy and all-reduce comes to the bits of one.
    """
    file = tmp_path / "digests.json"
    job = ("-m", "tests.ddp.across_hosts", str(file))
    with hosts.agent(hosts.a, *job, ranks=ranks) as one, hosts.agent(hosts.b, *job, ranks=ranks) as two:
        said = [agent.communicate(timeout=200)[1] for agent in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), "\n".join(said)
    assert json.loads(file.read_text()) == run_ranks(digests_as_if, 2 * ranks, ranks, timeout_s=200)[0]


def cut_off(hosts: TwoHosts, two: subprocess.Popen[str]) -> None:
    """The link is cut for longer than the timeout. The agent that has lost the rendezvous ends."""
    hosts.cut_link()
    try:
        assert two.wait(120) == 1
    finally:
        hosts.restore_link()


def power_off(hosts: TwoHosts, two: subprocess.Popen[str]) -> None:
    hosts.b.kill()
    two.wait(30)


@pytest.mark.parametrize("lose", [cut_off, power_off])
def test_a_host_is_lost_and_comes_back(
    tmp_path: Path, hosts: TwoHosts, undisturbed: Any, lose: Callable[[TwoHosts, subprocess.Popen[str]], None]
) -> None:
    """A job goes on from its newest checkpoint after a host is lost and comes back.

    The first host's agent waits for another, as a scheduler starts it, and the job goes on from its newest checkpoint.

    Claim (ddp/resilience/README.md): a host is lost and comes back; a link is cut for longer than the timeout.
    """
    folder = tmp_path / "run"
    job = ("-m", "ddp.train", *JOB, "--checkpoint-every", "5", "--timeout", "8", "--run-dir", str(folder))
    first, again = tmp_path / "first", tmp_path / "again"
    with hosts.agent(hosts.a, *job, env=NEW_STORES, output=first) as one:
        with hosts.agent(hosts.b, *job, env=NEW_STORES, output=tmp_path / "second") as two:
            wait_for_step(folder, 12)
            lose(hosts, two)
        with hosts.agent(hosts.b, *job, env=NEW_STORES, output=again) as back:
            assert (one.wait(120), back.wait(60)) == (0, 0), first.read_text() + again.read_text()
    (resumed,) = re.findall(r"resuming after step (\d+),", first.read_text() + again.read_text())
    assert int(resumed) >= 10 and int(resumed) % 5 == 0
    assert differences(folder, undisturbed) == []
