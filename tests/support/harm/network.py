"""Two hosts on one machine: network namespaces with addresses of their own, and a link of limited rate between them.

    with two_hosts() as hosts:
        with hosts.agent(hosts.a, "-m", "ddp.train") as one, hosts.agent(hosts.b, "-m", "ddp.train") as two:
            hosts.cut_link()

Needs root (:func:`why_not`). Everything is taken down at the end of the block: processes, link and namespaces. What a test that
was killed has left behind is taken down by the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.launch import REPOSITORY, start_program

PREFIX = "raw-ddp"
FILES = Path("/etc/netns")  # `ip netns exec NAME` shows the files in NAME's folder here as those of /etc
END_S = 10.0
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A namespace.

    :ivar name: of the namespace
    :ivar hostname: which both hosts can resolve
    :ivar address: IPv4, which the other host reaches over the link
    :ivar interface: of that address
    """

    name: str
    hostname: str
    address: str
    interface: str

    @property
    def command(self) -> tuple[str, ...]:
        """The words that start another command on this host."""
        return ("ip", "netns", "exec", self.name)

    def start(
        self, *arguments: str, env: Mapping[str, str] | None = None, output: Path | None = None, cwd: Path = REPOSITORY
    ) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """``python -m ARGUMENTS`` on this host; see :func:`tests.support.launch.start_program`."""
        return start_program(*self.command, sys.executable, "-m", *arguments, env=env, output=output, cwd=cwd)

    def run(self, *command: str) -> str:
        """Run a program on this host; what it printed."""
        return _run(*self.command, *command)

    def kill(self) -> None:
        """SIGKILL all processes of this host, as when its power is cut."""
        for pid in _run("ip", "netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


# Linux's net.ipv4.tcp_retries2: TCP gives up a connection after some 13 s without an answer. The default, 15, takes a quarter of
# an hour.
TCP_RETRIES = 5
NO_CARD = "02:00:00:00:00:00"


@dataclass(frozen=True)
class TwoHosts:
    """Two hosts and the link between them."""

    a: Host
    b: Host

    def unplug(self) -> None:
        """Pull the cable out of the second host: what is sent waits there."""
        self.b.run("ip", "link", "set", self.b.interface, "down")

    def plug_in(self) -> None:
        self.b.run("ip", "link", "set", self.b.interface, "up")

    def cut_link(self) -> None:
        """Lose every packet on the way, as a switch that has failed: they go to a network card that is not there. TCP gives
        up connections after some seconds."""
        for host, other in self._directions():
            host.run(*f"ip neigh replace {other.address} lladdr {NO_CARD} dev {host.interface} nud permanent".split())

    def restore_link(self) -> None:
        for host, other in self._directions():
            host.run("ip", "neigh", "del", other.address, "dev", host.interface)

    def _directions(self) -> tuple[tuple[Host, Host], tuple[Host, Host]]:
        return (self.a, self.b), (self.b, self.a)

    def agent(
        self,
        host: Host,
        *job: str,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """A torchrun agent, which meets that of the other host by c10d at the first host's address. It starts its ranks again when
        they have failed, and gives up an agent from which it has not heard for some seconds.

        :param job: what the ranks run, as ``"-m", "ddp.train"``
        :param ranks: on this host
        """
        flags = meeting(f"{self.a.address}:29400", "2", host is self.a)
        command = ("torch.distributed.run", *flags, f"--nproc_per_node={ranks}", f"--local-addr={host.address}")
        return host.start(*command, *job, env=env, output=output)


def meeting(endpoint: str, nodes: str, holds_store: bool) -> tuple[str, ...]:
    """Flags of a torchrun agent that meets the others by c10d, restarts its ranks, and gives up an agent that is silent for seconds.

    :param nodes: how many, as ``2`` or ``1:2``
    :param holds_store: true for one agent, with which the job ends
    """
    conf = (
        f"is_host={int(holds_store)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=15"
    )
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf={conf}")
    return (f"--nnodes={nodes}", "--max-restarts=3", *rendezvous)


# torchrun's agent would keep its store over restarts, in which ranks find the addresses of those that died, and a node that
# comes later waits for an address that is not written again (torch 2.15, elastic/rendezvous/dynamic_rendezvous.py).
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def why_not() -> str | None:
    """Why there cannot be two hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [program for program in ("ip", "tc") if shutil.which(program) is None]:
        return f"no {' and no '.join(missing)} here: apt-get install iproute2"
    trial = f"{PREFIX}-trial-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", trial], capture_output=True, text=True)
    if done.returncode != 0:
        return f"no network namespace can be made here: {done.stderr.strip()}"
    _run("ip", "netns", "del", trial)
    return None


@contextlib.contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[TwoHosts]:
    """Two hosts that reach each other and nothing else.

    :param rate: of the link, in either direction, in the words of ``tc``
    """
    _remove_leftovers()
    number = next(_numbers)
    a, b = (
        Host(f"{PREFIX}-{letter}-{number}-{os.getpid()}", f"host{place}", f"10.77.0.{place}", f"eth-{letter}")
        for place, letter in ((1, "a"), (2, "b"))
    )
    hosts = TwoHosts(a, b)
    try:
        names = ["127.0.0.1 localhost", *(f"{host.address} {host.hostname}" for host in (a, b))]
        for host in (a, b):
            files = FILES / host.name
            files.mkdir(parents=True)
            (files / "hosts").write_text("\n".join(names) + "\n")
            _run("ip", "netns", "add", host.name)
            host.run("ip", "link", "set", "lo", "up")
        _run(
            "ip", "-n", a.name, "link", "add", a.interface, "type", "veth", "peer", "name", b.interface, "netns", b.name
        )
        for host in (a, b):
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            host.run("ip", "link", "set", host.interface, "up")
            host.run(*f"tc qdisc add dev {host.interface} root tbf rate {rate} burst 256kb latency 50ms".split())
            host.run("sh", "-c", f"echo {TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2")
        yield hosts
    finally:
        for host in (a, b):
            _remove(host.name)


def _remove_leftovers() -> None:
    """Take down the hosts of tests that do not live any more."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not psutil.pid_exists(int(name.rpartition("-")[2])):
            _remove(name)


def _remove(name: str) -> None:
    """Kill what runs there, and remove the namespace; the link goes with it."""
    shutil.rmtree(FILES / name, ignore_errors=True)
    if name not in _run("ip", "netns", "list"):
        return
    deadline = time.monotonic() + END_S
    while (pids := _pids(name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)  # another test may have been quicker


def _pids(name: str) -> list[str]:
    """The processes in the namespace, if there is one."""
    return subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
