"""The ranks that a launcher has started: from where, with which devices, and how fast they reach each other.

    python -m ddp.launch.doctor                                      # this host
    torchrun --nproc_per_node=2 -m ddp.launch.doctor                 # in the place of ddp.train, under any launcher
    srun --nodes=2 --ntasks-per-node=1 python -m ddp.launch.doctor
    python -m ddp.launch.doctor --explain LOG...                     # which rank failed first, where and why: files, folders or -
    python -m ddp.launch.doctor --explain "MESSAGE"                  # which entries of symptoms.md fit an error message
    python -m ddp.launch.doctor --dumps DIR                          # which rank hangs: flight-recorder dumps and stacks

The ranks meet as those of ddp.train do: if one is missing, or was started differently, one line says so, and the exit status is 2.
Otherwise rank 0 prints what is wrong, a table of the ranks and one of the links between their hosts. Wrong are clocks that differ, hosts
with little disk, shared memory or open files, or a slow DNS, and a run directory that not all hosts see. Then the exit status is 1.

Until then, the ranks need only reach MASTER_ADDR: they exchange facts about themselves through the store there. Then they form
a group, in which the links are measured: a message goes there and back (the latency is half of that), and larger ones go one way
and are answered by a byte (the bandwidth).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import resource
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from ddp.launch.dumps import explain as dumps
    from ddp.launch.log import explain as logs

    for flag, main_of_flag in {"--explain": logs.main, "--dumps": dumps.main}.items():
        if any(argument.partition("=")[0] == flag for argument in sys.argv):
            main_of_flag()
            sys.exit()  # before torch is imported

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.command_line.cli import command, option, parse
from common.command_line.stdout import print_results
from common.distributed import DEVICES
from common.distributed.dist_env import DistEnv, find_dist_env
from common.distributed.rank_logging import rank_logging
from common.launchers import launcher_name
from ddp.rendezvous.addresses import addresses_by_interface, interface_towards
from ddp.rendezvous.launch_facts import software
from ddp.rendezvous.process_group import clean_exit, rendezvous_errors, rendezvous_store

ROUND_TRIPS, TRANSFERS = 20, 3
LARGE_BYTES = 16 * 2**20  # of the message whose time tells the bandwidth
MOST_PAIRS_OF = 8  # hosts, between which every pair is measured; if there are more, only those with rank 0's
MOST_CLOCK_S = 60.0  # by which clocks may differ before it is worth a word: logs of two hosts are read side by side

LEAST_GB = 1.0  # free, of the disk and of /dev/shm; a container gets 64 MB of the latter by default
LEAST_FILES = 1024  # open files: each batch on its way from a loader worker takes one per tensor
SHARED_MEMORY = "/dev/shm"
MOST_LOOKUP_S = 2.0

COLUMNS = ("host", "pid", "local rank", "interface", "device", "GPUs", "cores", "load", "clock")

Facts = Mapping[str, str]


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``ddp.launch.doctor``."""

    timeout: float = option(60.0, "seconds to wait for the other ranks", above=0, maximum=86_400)
    device: str = option("auto", "as in ddp.train", choices=DEVICES)
    interface: str | None = option(None, "as in ddp.train", per_node=True)
    run_dir: Path = option(Path("runs"), "folder of the runs, whose disk is looked at, and whether all hosts see it")
    explain: str | None = option(
        None,
        "explain this log (a file, a folder or -), or say what symptoms.md has of this message, and do nothing else",
    )
    dumps: Path = option(
        None,
        "say which rank did not join which collective, by the dumps and stacks in this folder, and do nothing else",
    )


@command
def main() -> None:
    config = parse(DoctorConfig, "ddp.launch.doctor", __doc__)
    env = find_dist_env(config.device)
    with clean_exit(env), rank_logging(env), rendezvous_errors(env):
        store = rendezvous_store(env, config.timeout, config)  # there the ranks compare what they were started with
        everyone = exchange_facts(store, env)
        problems = [*wrong_clocks(everyone), *wrong_hosts(everyone, store, env, config.run_dir)]
        if env.is_main:
            print_results(report(problems, everyone))
        hosts = first_ranks(everyone)
        if len(hosts) > 1:
            links = measure(hosts, store, env, config)
            if env.is_main:
                print_results("\n".join(["", *_aligned(links)]))
        if problems:
            sys.exit(1)


def exchange_facts(store: Store, env: DistEnv) -> list[Facts]:
    """The facts of all ranks, by way of the store."""
    facts = {"time": str(time.time()), **facts_of(env)}  # first the time: the ranks are here within milliseconds
    everyone = _exchange(store, env, "facts", facts)
    first = float(everyone[0]["time"])
    return [{**facts, "clock": f"{float(facts['time']) - first:+.1f} s"} for facts in everyone]


def _exchange(store: Store, env: DistEnv, name: str, value: object) -> list[Any]:
    """The values of all ranks."""
    store.set(f"doctor/{name}/{env.rank}", json.dumps(value))
    return [json.loads(store.get(f"doctor/{name}/{rank}")) for rank in range(env.world_size)]


def facts_of(env: DistEnv) -> dict[str, str]:
    """This rank's own facts."""
    towards = interface_towards(os.environ.get("MASTER_ADDR", "localhost"))
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or towards or "lo"
    addresses = addresses_by_interface().get(interface, [])
    gpu = torch.cuda.get_device_name(env.device) if env.device.type == "cuda" else ""
    return {
        "host": env.host,
        "pid": str(os.getpid()),
        "local rank": f"{env.local_rank} of {env.local_world_size}",
        "interface": f"{interface} ({addresses[0] if addresses else 'no address'})",
        "device": f"{env.device} {gpu}".strip(),
        "GPUs": str(torch.cuda.device_count()),
        "cores": str(env.share_of_cores * env.local_world_size),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def wrong_clocks(everyone: Sequence[Facts]) -> list[str]:
    """A line for each clock that would make the logs of two hosts hard to read."""
    return [
        f"wrong: the clock of {facts['host']} (rank {rank}) differs by {facts['clock']} from that of rank 0"
        for rank, facts in enumerate(everyone)
        if abs(float(facts["clock"].split()[0])) > MOST_CLOCK_S
    ]


def wrong_hosts(everyone: Sequence[Facts], store: Store, env: DistEnv, run_dir: Path) -> list[str]:
    """A line for each thing of which a host has too little, and for each host that does not see rank 0's run directory."""
    path = run_dir.absolute()
    folder = next(one for one in (path, *path.parents) if one.is_dir())
    shown = folder / f".doctor-{everyone[0]['pid']}"
    if env.is_main:
        with contextlib.suppress(OSError):  # it is then missing below
            shown.touch()
    _exchange(store, env, "shown", None)
    found = []
    if env.local_rank == 0:
        found = list(scarce(folder))
        if not shown.exists():
            found.append(f"cannot write to {folder}" if env.is_main else f"does not see what rank 0 writes to {folder}")
    of_all = _exchange(store, env, "found", found)
    if env.is_main:
        shown.unlink(missing_ok=True)
    return [f"wrong: {facts['host']} {line}" for facts, lines in zip(everyone, of_all, strict=True) for line in lines]


def scarce(folder: Path) -> Iterator[str]:
    """Words for each thing of which this host has so little that training may fail, with what to do.

    :param folder: where the runs will be
    """
    shared_memory = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else folder
    disk, shared = (shutil.disk_usage(path).free / 1e9 for path in (folder, shared_memory))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if disk < LEAST_GB:
        yield f"has {disk:.2f} GB free for runs: make room, or give another --run-dir"
    if shared < LEAST_GB:
        yield f"has {shared:.2f} GB free in {SHARED_MEMORY}, for loader workers: in a container, give --shm-size or --ipc=host"
    if 0 <= files < LEAST_FILES:  # without a limit it is -1
        yield f"lets a process open {files} files: raise it by ulimit -n"
    began = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo(("::ffff:127.0.0.1", 0), 0)  # as both ends of each connection to torch's store do
    if (seconds := time.monotonic() - began) > MOST_LOOKUP_S:
        yield f"takes {seconds:.0f} s to find the name of an address, and a job does that many times at its start: check its DNS"


def _host_of(facts: Facts) -> tuple[str, str]:
    """Containers may have the same name."""
    return facts["host"], facts["interface"]


def first_ranks(everyone: Sequence[Facts]) -> dict[str, int]:
    """The lowest rank of each host. On one host, every rank counts as a host of its own."""
    firsts: dict[tuple[str, str], int] = {}
    for rank, facts in enumerate(everyone):
        firsts.setdefault(_host_of(facts), rank)
    if len(firsts) == 1:
        return {f"rank {rank}": rank for rank in range(len(everyone))}
    return {f"{everyone[rank]['host']} (rank {rank})": rank for rank in firsts.values()}


def measure(hosts: Mapping[str, int], store: Store, env: DistEnv, config: DoctorConfig) -> list[list[str]]:
    """Form a group, and time messages between each pair of hosts, one pair after another; if there are many hosts, between rank 0's
    and each. A collective.

    :param hosts: a rank of each, rank 0's first
    :returns: on rank 0, the rows of a table, for its title and every link
    """
    timeout = datetime.timedelta(seconds=config.timeout)
    dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    links = [["from", "to", "latency", "bandwidth"]]
    for (first, sender), (second, receiver) in itertools.combinations(hosts.items(), 2):
        if sender > 0 and len(hosts) > MOST_PAIRS_OF:
            continue
        seconds = torch.zeros(2, dtype=torch.float64)
        if env.rank in (sender, receiver):
            other = receiver if env.rank == sender else sender
            seconds[0] = _median_seconds(ROUND_TRIPS, 1, env.rank == sender, other) / 2
            seconds[1] = _median_seconds(TRANSFERS, LARGE_BYTES, env.rank == sender, other)
        dist.broadcast(seconds, sender)
        latency, large = seconds.tolist()
        speed = LARGE_BYTES / max(large - latency, 1e-9)
        links.append([first, second, f"{1e6 * latency:.0f} us", f"{speed / 2**20:.0f} MiB/s"])
    return links


def _median_seconds(times: int, size: int, sends: bool, other: int) -> float:
    """The median time of a message of this size to the other rank, and its answer of one byte. The first is left out."""
    message, answer = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        if sends:
            dist.send(message, other)
            dist.recv(answer, other)
        else:
            dist.recv(message, other)
            dist.send(answer, other)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def report(problems: Sequence[str], everyone: Sequence[Facts]) -> str:
    """The problems, the software, and a table of the ranks."""
    ranks, hosts = len(everyone), len(set(map(_host_of, everyone)))
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if "RANK" in os.environ else "nowhere"
    lines = [
        *(problems or ["nothing is wrong"]),
        f"started by {launcher_name()}: {ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}, meeting at {where}",
        f"rank 0 has {', '.join(f'{name} {value}' for name, value in software().items())}",
        "",
    ]
    rows = [["rank", *COLUMNS], *([str(rank), *map(facts.__getitem__, COLUMNS)] for rank, facts in enumerate(everyone))]
    return "\n".join([*lines, *_aligned(rows)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    main()
