"""ddp/launch/*.sbatch on a real SLURM of two nodes: they train, are requeued, and end with the bits of one host."""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.launchers import expand_hosts
from tests.launchers.slurm import Cluster, slurm, why_not
from tests.support.harm.kill import JOB, wait_for_step
from tests.support.harm.left import differences
from tests.support.harm.network import TwoHosts
from tests.support.launch import REPOSITORY

pytestmark = pytest.mark.faults

LAUNCH = REPOSITORY / "ddp" / "launch"
# With torchrun's agents, and without: a rank on each node.
JOBS = {
    "torchrun": (str(LAUNCH / "slurm.sbatch"), *JOB),
    "srun": ("--ntasks-per-node=1", str(LAUNCH / "slurm-srun.sbatch"), *JOB),
}


@pytest.fixture(scope="module")
def cluster(hosts: TwoHosts) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # short: it holds sockets
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        yield stack.enter_context(slurm(hosts, folder))


@pytest.mark.parametrize("job", JOBS)
def test_a_job_over_two_nodes_survives_a_preemption(cluster: Cluster, undisturbed: Any, job: str) -> None:
    """On a real SLURM of two nodes, a preempted job is requeued and ends with the right bits.

    Claim (ddp/README.md): launch: on a real SLURM of two nodes a preempted job is requeued, and ends with the right
    bits.
    """
    number = cluster.sbatch(*JOBS[job])
    folder = cluster.folder / "runs" / f"slurm-{number}"
    wait_for_step(folder, 5)
    cluster.run("scancel", "--signal=TERM", number)
    assert cluster.wait(number) == "COMPLETED", cluster.logs()
    assert cluster.restarts(number) == 1

    logs = {path.name: path.read_text() for path in cluster.folder.glob(f"ddp-{number}*.log")}
    assert sorted(logs) == [f"ddp-{number}-0.log", f"ddp-{number}-1.log", f"ddp-{number}.log"]
    everything = "\n".join(logs.values())
    assert re.search(r"stopped by SIGTERM on rank .* after step \d+, which is saved", everything), everything
    assert re.search(r"resuming after step \d+,", everything), everything
    assert differences(folder, undisturbed) == []


def test_hosts_are_those_that_slurm_tells(cluster: Cluster) -> None:
    for hosts in ("n[1-3,07],gpu5", "r[1-2]n[008-010],head", "a"):
        assert expand_hosts(hosts) == cluster.run("scontrol", "show", "hostnames", hosts).split()
