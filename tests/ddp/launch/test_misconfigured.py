"""Mistakes with several hosts: one line where it is wrong, with the cure."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.harm.kill import JOB
from tests.support.harm.network import TwoHosts
from tests.support.launch import REPOSITORY, error_lines, wait_until

pytestmark = pytest.mark.faults

NAME = re.escape(socket.gethostname())
DIFFER = "the ranks were started differently: "


@dataclass(frozen=True)
class Misconfiguration:
    """A job of a rank on each host, and what is wrong with it.

    :ivar lines: what the rank on each host must say
    :ivar wrong: variables on each host
    """

    lines: tuple[str, ...]
    wrong: tuple[Mapping[str, str], ...] = ({}, {})
    timeout_s: int = 60
    source_on_2: Path = field(default=REPOSITORY)


MISCONFIGURATIONS = {
    "rank 0 is not on the master's host": Misconfiguration(
        (
            rf"no rendezvous at MASTER_ADDR host1, MASTER_PORT 29500, from {NAME}: .*: has rank 0 started there",
            rf"rank 0 is on {NAME}, but MASTER_ADDR host1 \(10\.77\.0\.1\) is another host: start rank 0 there, or set",
        ),
        ({"RANK": "1"}, {"RANK": "0"}),
        timeout_s=8,
    ),
    "the master's address is loopback": Misconfiguration(
        (
            rf"ranks \[1\] did not come, 1 of 2 did, from {NAME}: start the others, and check that their hosts can reach this",
            rf"MASTER_ADDR 127\.0\.0\.1 is {NAME} itself, and no rank 0 is here: set it to an address of rank 0's host",
        ),
        ({"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "127.0.0.1"}),
        timeout_s=25,
    ),
    "the master's address does not resolve": Misconfiguration(
        (
            rf"MASTER_ADDR no-such-host cannot be resolved on {NAME}: set it to the name or address of the host of rank 0",
        )
        * 2,
        ({"MASTER_ADDR": "no-such-host"},) * 2,
        timeout_s=8,
    ),
    "there is no route to the master": Misconfiguration(
        (
            rf"rank 0 is on {NAME}, but MASTER_ADDR 192\.0\.2\.7 \(192\.0\.2\.7\) is another host",
            rf"{NAME} has no way to MASTER_ADDR 192\.0\.2\.7: network is unreachable: check the address",
        ),
        ({"MASTER_ADDR": "192.0.2.7"},) * 2,
    ),
    "two jobs that meet in one place": Misconfiguration(
        (DIFFER + "LSB_JOBID is 1 on rank 0, but 2 on rank 1",) * 2, ({"LSB_JOBID": "1"}, {"LSB_JOBID": "2"})
    ),
    "an interface that only one host has": Misconfiguration(
        (
            rf"ranks \[1\] did not come, 1 of 2 did, from {NAME}",
            rf"GLOO_SOCKET_IFNAME=eth-a: eth-a is not an interface of {NAME}, which has eth-b \(10\.77\.0\.2",
        ),
        ({"GLOO_SOCKET_IFNAME": "eth-a"},) * 2,
        timeout_s=8,
    ),
}


def run_ranks(
    hosts: TwoHosts, folder: Path, case: Misconfiguration, run_dirs: tuple[str, str] = ("run", "run")
) -> list[tuple[int, str]]:
    """The exit status of the rank on each host, and what it printed."""
    outputs = [folder / f"host{number}.out" for number in (1, 2)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, (host, output) in enumerate(zip((hosts.a, hosts.b), outputs, strict=True)):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": "host1", "MASTER_PORT": "29500"}
            flags = ("--run-dir", str(folder / run_dirs[rank]), "--timeout", str(case.timeout_s))
            command = ["ddp.train", *JOB, *flags]
            cwd = case.source_on_2 if rank == 1 else REPOSITORY
            env = {**place, **meeting, **case.wrong[rank]}
            processes.append(stack.enter_context(host.start(*command, env=env, output=output, cwd=cwd)))
        statuses = [process.wait(120) for process in processes]
    return [(status, output.read_text()) for status, output in zip(statuses, outputs, strict=True)]


def assert_said(ended: list[tuple[int, str]], lines: tuple[str, ...]) -> None:
    """One line each, and status 2."""
    for (status, output), line in zip(ended, lines, strict=True):
        (said,) = error_lines(output)
        assert re.search(line, said), said
        assert status == 2, output


@pytest.mark.parametrize("name", MISCONFIGURATIONS)
def test_a_misconfiguration_is_one_line(name: str, hosts: TwoHosts, tmp_path: Path) -> None:
    """A misconfiguration of two hosts is one line that names it.

    Claim (ddp/README.md): launch: misconfigurations of two hosts are one line each.
    """
    assert_said(run_ranks(hosts, tmp_path, MISCONFIGURATIONS[name]), MISCONFIGURATIONS[name].lines)


def test_another_version_of_the_project(hosts: TwoHosts, tmp_path: Path) -> None:
    """Hosts with different sources of this project are told so."""
    for package in ("common", "ddp", "dataloading", "dataparallel"):
        shutil.copytree(REPOSITORY / package, tmp_path / "other" / package)
    with open(tmp_path / "other" / "ddp" / "config.py", "a") as file:
        file.write("# newer\n")
    line = DIFFER + r"the digest of this project's source is \w+ on rank 0, but \w+ on rank 1"
    assert_said(run_ranks(hosts, tmp_path, Misconfiguration((), source_on_2=tmp_path / "other")), (line, line))


def test_a_firewall_that_drops_the_port(hosts: TwoHosts, tmp_path: Path) -> None:
    """A firewall that drops packets to the port is named in one line.

    As a rule of the kernel's routing, before that which takes what is for this host.

    Claim (ddp/README.md): launch: misconfigurations of two hosts are one line each.
    """
    drop = f"add pref 5 iif {hosts.a.interface} ipproto tcp dport 29500 blackhole"
    for rule in ("add pref 10 lookup local", "del pref 0", drop):
        hosts.a.run("ip", "rule", *rule.split())
    try:
        ended = run_ranks(hosts, tmp_path, Misconfiguration((), timeout_s=8))
    finally:
        hosts.a.run("ip", "rule", "del", "pref", "5")
    lines = (
        r"ranks \[1\] did not come, 1 of 2 did",
        rf"no rendezvous at MASTER_ADDR host1, MASTER_PORT 29500, from {NAME}: .*: .* does a firewall let the port through\?",
    )
    assert_said(ended, lines)


def test_a_run_directory_that_is_not_shared(hosts: TwoHosts, tmp_path: Path) -> None:
    """It trains. The second host keeps the log of its rank."""
    ended = run_ranks(hosts, tmp_path, Misconfiguration(()), run_dirs=("run", "its-own"))
    assert [status for status, _ in ended] == [0, 0], ended
    assert re.search(r"its-own on \S+ is not that of rank 0, which writes the run and its checkpoints", ended[1][1])
    assert [
        path.relative_to(tmp_path / "its-own").as_posix() for path in sorted((tmp_path / "its-own").rglob("*.*"))
    ] == ["logs/rank1.log"]
    assert (tmp_path / "run" / "curves.png").exists()


def test_the_rendezvous_id_of_a_dead_job(hosts: TwoHosts, tmp_path: Path) -> None:
    """A job that was killed while its agent waited for another leaves nothing: the next one may have its id and its port."""
    job = ("-m", "ddp.train", *JOB, "--epochs", "1", "--run-dir", str(tmp_path / "run"))
    with hosts.agent(hosts.a, *job, output=tmp_path / "dead"):
        wait_until(lambda: ":29400" in hosts.a.run("ss", "--listening", "--tcp", "--numeric"))
        hosts.a.kill()
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(hosts.agent(host, *job, output=tmp_path / host.hostname)) for host in (hosts.a, hosts.b)
        ]
        assert [agent.wait(120) for agent in agents] == [0, 0]
