"""A real SLURM of two nodes on one machine: munged, slurmctld, and a slurmd in each of two network namespaces.

    with two_hosts() as hosts, slurm(hosts, folder) as cluster:
        job = cluster.sbatch("ddp/launch/slurm.sbatch", "--epochs", "1")
        assert cluster.wait(job) == "COMPLETED"

Needs root and Debian's slurm-wlm and munge (:func:`why_not`). All daemons and what they started end with the block.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.harm import network
from tests.support.harm.network import TwoHosts
from tests.support.launch import REPOSITORY, clean_environment, start_program, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")
START_S = 60.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

CONFIGURATION = """
ClusterName=two-hosts
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=30
PartitionName=cpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    :ivar hosts: of the nodes, which have the hosts' names
    :ivar folder: of its configuration, state and logs, and the working directory of its jobs
    """

    hosts: TwoHosts
    folder: Path

    def run(self, *command: str, env: dict[str, str] | None = None) -> str:
        """Run a program of SLURM on the first host; what it printed."""
        done = subprocess.run(
            [*self.hosts.a.command, *command],
            cwd=self.folder,
            env=self.environment | (env or {}),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead to the cluster, this Python and this project. Jobs get them too."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        paths = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "SLURM_CONF": str(self.folder / "slurm.conf")}
        return clean_environment() | paths

    def sbatch(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """Submit a script; the job's number."""
        return self.run("sbatch", "--parsable", *arguments, env=env).strip()

    def restarts(self, job: str) -> int:
        """How often it was requeued."""
        return int(self._field(job, "Restarts"))

    def _field(self, job: str, name: str) -> str:
        return self.run("scontrol", "show", "job", job, "-o").partition(f" {name}=")[2].split()[0]

    def wait(self, job: str, timeout_s: float = 240.0) -> str:
        """Wait until the job is over; its state. (A job that is requeued need not wait the two minutes that SLURM gives it.)"""
        deadline, hurried = time.monotonic() + timeout_s, False
        while (state := self._field(job, "JobState")) not in OVER:
            if not hurried and state == "PENDING" and self._field(job, "Reason") == "BeginTime":
                # Not at once: the nodes refuse a job in the second in which its credential was revoked.
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now+5")
                hurried = True
            assert time.monotonic() < deadline, f"job {job} is {state} after {timeout_s} s:\n{self.logs()}"
            time.sleep(0.3)
        return state

    def logs(self) -> str:
        """All that the cluster and its jobs have written."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)


def why_not() -> str | None:
    """Why there cannot be a cluster here, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge"
    return network.why_not()


@contextlib.contextmanager
def slurm(hosts: TwoHosts, folder: Path) -> Iterator[Cluster]:
    """A cluster with a node on each host.

    :param folder: an empty one with a short path, since it holds a socket
    """
    cluster = Cluster(hosts, folder)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    for name in ("state", hosts.a.hostname, hosts.b.hostname):
        (folder / name).mkdir()
    name = socket.gethostname()  # of both: only their network is their own
    nodes = [
        f"NodeName={host.hostname} NodeHostname={name} NodeAddr={host.address} Port=17001 CPUs=2"
        for host in (hosts.a, hosts.b)
    ]
    general = CONFIGURATION.format(controller=name, address=hosts.a.address, folder=folder)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # looked for, whether tasks use them or not
    (folder / "slurm.conf").write_text("\n".join([general, *nodes]) + "\n")
    with contextlib.ExitStack() as stack:
        for command in (
            [*hosts.a.command, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
             f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed", f"--log-file={folder}/munge.log"],
            [*hosts.a.command, "slurmctld", "-D"],
            [*hosts.a.command, "slurmd", "-D", "-N", hosts.a.hostname],
            [*hosts.b.command, "slurmd", "-D", "-N", hosts.b.hostname],
        ):  # fmt: skip
            output = folder / f"daemon-{len(list(folder.glob('daemon-*')))}.log"
            stack.enter_context(start_program(*command, env=cluster.environment, output=output))
            wait_until((folder / "munge.socket").exists, START_S)
        deadline = time.monotonic() + START_S
        while (states := _states(cluster)) != ["idle", "idle"]:
            assert time.monotonic() < deadline, f"the nodes are {states}:\n{cluster.logs()}"
            time.sleep(0.2)
        yield cluster


def _states(cluster: Cluster) -> list[str]:
    done = subprocess.run(
        [*cluster.hosts.a.command, "sinfo", "-h", "-N", "-o", "%T"],
        env=cluster.environment,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()
