"""The same small job, started in nine ways: one digest of the final weights.

    python -m tests.launchers            # all; needs root, slurm-wlm and munge
    python -m tests.launchers standalone by-hand

Two ranks. Where a launcher is for several hosts, there is a rank on each of two (tests/support/harm/network.py). SLURM is a real one
(tests/launchers/slurm.py); LSF's ``blaunch`` is a stand-in; what Kubernetes and Azure ML set is set here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import shutil
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp.checkpoint import storage
from tests.ddp.jobs import newest
from tests.launchers import slurm
from tests.launchers.slurm import Cluster
from tests.support.harm.network import Host, TwoHosts, two_hosts
from tests.support.launch import REPOSITORY, free_port, start_program

JOB = (
    "--train-samples", "720", "--test-samples", "100", "--batch-size", "24", "--epochs", "1", "--device", "cpu", "--threads", "1"
)  # fmt: skip
TRAIN = ("-m", "ddp.train", *JOB)
LIMIT_S = 240.0
BLAUNCH = Path(__file__).with_name("blaunch")


@dataclass(frozen=True)
class Start:
    """A command that is typed.

    :ivar environment: what stands in its environment beside everything else
    :ivar host: on which it is typed; None for this machine without namespaces
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    host: Host | None = None


@dataclass(frozen=True)
class Machines:
    """The machines that launchers need, made when the first one asks for it."""

    stack: contextlib.ExitStack
    folder: Path

    @functools.cached_property
    def hosts(self) -> TwoHosts:
        return self.stack.enter_context(two_hosts())

    @functools.cached_property
    def cluster(self) -> Cluster:
        folder = self.folder / "slurm"
        folder.mkdir()
        return self.stack.enter_context(slurm.slurm(self.hosts, folder))

    def on_both(self, command: Callable[[int, Host], tuple[str, ...]], environment: Mapping[str, str]) -> list[Start]:
        """A command on each host.

        :param command: of the host's number, and the host
        :param environment: with ``{number}`` for the host's number
        """
        return [
            Start(command(number, host), {name: text.format(number=number) for name, text in environment.items()}, host)
            for number, host in enumerate((self.hosts.a, self.hosts.b))
        ]


def standalone(machines: Machines) -> list[Start]:
    return [Start(("torchrun", "--standalone", "--nproc-per-node=2", *TRAIN), {})]


def static(machines: Machines) -> list[Start]:
    def command(number: int, host: Host) -> tuple[str, ...]:
        meeting = (f"--node-rank={number}", f"--master-addr={machines.hosts.a.hostname}", "--master-port=29500")
        return ("torchrun", "--nnodes=2", "--nproc-per-node=1", *meeting, *TRAIN)

    return machines.on_both(command, {})


def c10d(machines: Machines) -> list[Start]:
    def command(number: int, host: Host) -> tuple[str, ...]:
        endpoint = f"--rdzv-endpoint={machines.hosts.a.hostname}:29400"
        own = (f"--rdzv-conf=is_host={1 - number}", f"--local-addr={host.hostname}")
        return (
            "torchrun",
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            endpoint,
            "--rdzv-id=job",
            *own,
            *TRAIN,
        )

    return machines.on_both(command, {})


def srun(machines: Machines) -> list[Start]:
    command = ("srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "python", *TRAIN)
    return [Start(command, machines.cluster.environment, machines.hosts.a)]


def sbatch(machines: Machines) -> list[Start]:
    """The agents of torchrun in a batch job."""
    command = ("sbatch", "--wait", str(REPOSITORY / "ddp/launch/slurm.sbatch"), *JOB)
    return [Start(command, machines.cluster.environment, machines.hosts.a)]


def lsf(machines: Machines) -> list[Start]:
    """As LSF starts the script on the first of a job's hosts."""
    hosts = machines.hosts
    environment = {
        "LSB_JOBID": "12", "LSB_MCPU_HOSTS": f"{hosts.a.hostname} 1 {hosts.b.hostname} 1", "FLAGS": " ".join(JOB),
        "PATH": f"{BLAUNCH}:{_path()}", "BLAUNCH_NAMESPACES": " ".join(f"{h.hostname}={h.name}" for h in (hosts.a, hosts.b)),
    }  # fmt: skip
    return [Start(("bash", "ddp/launch/lsf.bsub"), environment)]


def kubernetes(machines: Machines) -> list[Start]:
    """Kubeflow's Trainer sets these in each pod, and torchrun reads them."""
    sizes = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "{number}"}
    meeting = {"PET_MASTER_ADDR": machines.hosts.a.hostname, "PET_MASTER_PORT": "29500"}
    return machines.on_both(lambda number, host: ("torchrun", *TRAIN), {**sizes, **meeting})


def azure(machines: Machines) -> list[Start]:
    """The variables that Azure ML sets for each rank of a job with ``distribution: type: pytorch``."""
    ranks = {
        "RANK": "{number}",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "NODE_RANK": "{number}",
        "AZUREML_NODE_COUNT": "2",
    }
    meeting = {"MASTER_ADDR": machines.hosts.a.address, "MASTER_PORT": "6105"}
    return machines.on_both(lambda number, host: ("python", *TRAIN), {**ranks, **meeting})


def by_hand(machines: Machines) -> list[Start]:
    """As torch.multiprocessing's examples set them."""
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [
        Start(("python", *TRAIN), {"RANK": str(rank), "LOCAL_RANK": str(rank), **sizes, **meeting}) for rank in range(2)
    ]


LAUNCHERS: dict[str, Callable[[Machines], list[Start]]] = {
    "standalone": standalone,
    "static": static,
    "c10d": c10d,
    "srun": srun,
    "sbatch": sbatch,
    "lsf": lsf,
    "kubernetes": kubernetes,
    "azure": azure,
    "by-hand": by_hand,
}


def main() -> None:
    parser = ArgumentParser("python -m tests.launchers", None, __doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("launchers", nargs="*", metavar="LAUNCHER", help=f"of {', '.join(LAUNCHERS)} (default: all)")
    names = parser.parse_args().launchers or list(LAUNCHERS)
    if unknown := [name for name in names if name not in LAUNCHERS]:
        parser.error(f"there is no launcher {unknown[0]}: take one of {', '.join(LAUNCHERS)}")
    if reason := slurm.why_not():
        parser.error(f"two hosts and SLURM cannot be had here: {reason}")
    print(f"JOB={shlex.quote(shlex.join(JOB))}")
    digests = run(names, print)
    if len(set(digests.values())) > 1:
        sys.exit("the digests differ")


def run(names: Sequence[str], report: Callable[[str], None]) -> dict[str, str]:
    """Train with each of these launchers.

    :param report: called with the lines of the table
    :returns: the digest of the final weights, by launcher
    """
    digests = {}
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="launch", dir="/tmp"))  # short: it holds sockets
        stack.callback(shutil.rmtree, folder)
        machines = Machines(stack, folder)
        for name in names:
            run_dir = folder / name
            starts = LAUNCHERS[name](machines)
            _finish(starts, run_dir, folder)
            digests[name] = digest_of(run_dir)
            report(f"{name}: {digests[name]}")
            for start in starts:
                report(f"  {start.host.hostname if start.host else 'here'}: {as_typed(start)}")
    return digests


def as_typed(start: Start) -> str:
    """The command with its environment, with JOB for the flags of the job."""
    hidden = ("PATH", "BLAUNCH_NAMESPACES") if "SLURM_CONF" not in start.environment else start.environment
    own = [f"{name}={shlex.quote(value)}" for name, value in sorted(start.environment.items()) if name not in hidden]
    line = " ".join([*own, shlex.join(start.command)]).replace(f"{REPOSITORY}/", "")
    return line.replace(shlex.quote(shlex.join(JOB)), '"$JOB"').replace(shlex.join(JOB), "$JOB")


def digest_of(run_dir: Path) -> str:
    """The first 16 digits of SHA-256 of all weights and buffers that the run has come to."""
    digest = hashlib.sha256()
    for name, value in sorted(storage.read(newest(run_dir).path, "model").items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()[:16]


def _finish(starts: Sequence[Start], run_dir: Path, folder: Path) -> None:
    """Run all commands of a job at once, and wait for them.

    :raises AssertionError: with what they printed, if one fails or does not end in time
    """
    outputs = [folder / f"{run_dir.name}-{number}.out" for number in range(len(starts))]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                start_program(
                    *(start.host.command if start.host else ()),
                    *start.command,
                    *(("--run-dir", str(run_dir)) if "ddp.train" in start.command else ()),
                    env={"PATH": _path(), "PYTHONPATH": str(REPOSITORY), "RUN_DIR": str(run_dir), **start.environment},
                    cwd=folder if start.command[0] == "sbatch" else REPOSITORY,
                    output=output,
                )
            )
            for start, output in zip(starts, outputs, strict=True)
        ]
        statuses = [process.wait(LIMIT_S) for process in processes]
    said = "\n".join(output.read_text() for output in outputs)
    assert set(statuses) == {0}, f"{run_dir.name} ended with {statuses}:\n{said}"


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


if __name__ == "__main__":
    main()
