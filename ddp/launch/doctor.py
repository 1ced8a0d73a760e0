"""The ranks that a launcher has started: which came, from where, with which software, and how fast they reach each other.

    python -m ddp.launch.doctor                                      # this host
    torchrun --nproc_per_node=2 -m ddp.launch.doctor                 # in the place of ddp.train, under any launcher
    srun --nodes=2 --ntasks-per-node=1 python -m ddp.launch.doctor

Rank 0 prints what is wrong first, then a table of the ranks and one of the links between their hosts. The exit status is 1 if
something is wrong.

The ranks need only reach MASTER_ADDR: they exchange facts about themselves through the store there. Only when all have come, and
run the same software, do they form a group, in which the links are measured: a message goes there and back (the latency is half of
that), and larger ones go one way and are answered by a byte (the bandwidth).
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from common.cli import command, option, parse
from common.distributed import STORE_POLL_S
from common.distributed.addresses import addresses_by_interface, interface_towards
from common.distributed.agreement import READ_S, differences, different_gpus, shared_gpu, wait_for
from common.distributed.launch_facts import gpu_facts, software
from common.distributed.process_group import DEVICES, DistEnv, clean_exit, find_dist_env, open_store, rendezvous_errors
from common.distributed.rank_logging import rank_logging
from common.launchers import launcher_name
from common.stdout import print_results

ROUND_TRIPS, TRANSFERS = 20, 3
MOST_PAIRS_OF = 8  # hosts, between which every pair is measured; if there are more, only those with rank 0's
MOST_CLOCK_S = 60.0  # by which clocks may differ before it is worth a word: logs of two hosts are read side by side

# Facts that may differ between the ranks of a job: the columns of the table.
OWN = ("host", "pid", "local rank", "interface", "device", "GPUs", "cores", "clock")

Facts = Mapping[str, str]


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``ddp.launch.doctor``."""

    timeout: float = option(60.0, "seconds to wait for the other ranks", above=0, maximum=86_400)
    mebibytes: int = option(16, "size of the message whose time tells the bandwidth", minimum=1, maximum=1024)
    device: str = option("auto", "as in ddp.train", choices=DEVICES)
    interface: str | None = option(None, "as in ddp.train", per_node=True)


@command
def main() -> None:
    config = parse(DoctorConfig, "ddp.launch.doctor", __doc__)
    env = find_dist_env(config.device)
    with clean_exit(env), rank_logging(env):
        with rendezvous_errors(env):
            store = open_store(env, config.timeout, config)
            everyone = exchange_facts(store, env, facts_of(env, config), config.timeout)
        problems = what_is_wrong(everyone, env.world_size) if env.is_main else []
        if env.is_main:
            print_results(report(problems, everyone, env))
        hosts = agree(store, env, first_ranks(everyone) if not problems else {}, config.timeout)
        if len(hosts) > 1:
            links = measure(hosts, store, env, config)
            if env.is_main:
                print_results("\n".join(["", *_aligned(links)]))
        if problems:
            sys.exit(1)


def facts_of(env: DistEnv, config: DoctorConfig) -> dict[str, str]:
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
        **software(),
        "started by": launcher_name(),
        **(gpu_facts(env) if env.device.type == "cuda" else {}),
    }


def exchange_facts(store: Store, env: DistEnv, facts: dict[str, str], timeout_s: float) -> dict[int, Facts]:
    """Put this rank's facts into the store, for rank 0 to read.

    :returns: on rank 0, the facts by rank, of those that came; on the others, their own
    :raises torch.distributed.DistStoreError: when rank 0 does not answer
    """
    deadline = time.monotonic() + timeout_s
    if env.is_main:
        everyone: dict[int, Facts] = {0: {**facts, "clock": "+0.0 s"}}
        while len(everyone) < env.world_size and time.monotonic() < deadline:
            store.set("time", repr(time.time()))  # what the others read is as old as one turn of this loop
            for rank in set(range(env.world_size)) - everyone.keys():
                if store.check([f"facts/{rank}"]):
                    everyone[rank] = json.loads(store.get(f"facts/{rank}"))
            time.sleep(STORE_POLL_S)
        return dict(sorted(everyone.items()))
    if wait_for(["time"], store, deadline):
        raise dist.DistStoreError("rank 0 did not answer")
    facts = {**facts, "clock": f"{time.time() - float(store.get('time')):+.1f} s"}
    store.set(f"facts/{env.rank}", json.dumps(facts))
    return {env.rank: facts}


def what_is_wrong(everyone: Mapping[int, Facts], world_size: int) -> list[str]:
    """A line for each thing that would keep a job from running, or make it hard to read."""
    problems = []
    if absent := [rank for rank in range(world_size) if rank not in everyone]:
        hosts = ", ".join(dict.fromkeys(facts["host"] for facts in everyone.values()))
        problems.append(
            f"{len(everyone)} of {world_size} ranks came, from {hosts}. Not rank {', '.join(map(str, absent))}: start the others, "
            "and check that their hosts can reach MASTER_ADDR and MASTER_PORT"
        )
    same = {rank: {k: v for k, v in facts.items() if k not in OWN} for rank, facts in everyone.items()}
    problems += differences(same)
    problems += [line for line in (shared_gpu(everyone), different_gpus(everyone)) if line is not None]
    for rank, facts in everyone.items():
        if abs(float(facts["clock"].split()[0])) > MOST_CLOCK_S:
            problems.append(
                f"the clock of {facts['host']} (rank {rank}) differs by {facts['clock']} from that of rank 0"
            )
    return problems


def _host_of(facts: Facts) -> tuple[str, str]:
    """Containers may have the same name."""
    return facts["host"], facts["interface"]


def first_ranks(everyone: Mapping[int, Facts]) -> dict[str, int]:
    """The lowest rank of each host. On one host, every rank counts as a host of its own."""
    firsts: dict[tuple[str, str], int] = {}
    for rank, facts in everyone.items():
        firsts.setdefault(_host_of(facts), rank)
    if len(firsts) == 1:
        return {f"rank {rank}": rank for rank in everyone}
    return {f"{everyone[rank]['host']} (rank {rank})": rank for rank in firsts.values()}


def agree(store: Store, env: DistEnv, hosts: dict[str, int], timeout_s: float) -> dict[str, int]:
    """Rank 0 tells all between which ranks they measure; none if something is wrong. It waits until they have read that,
    since it may serve the store."""
    if env.is_main:
        store.set("hosts", json.dumps(hosts))
        if not hosts:
            wait_for([f"read/{rank}" for rank in range(1, env.world_size)], store, time.monotonic() + READ_S)
        return hosts
    if wait_for(["hosts"], store, time.monotonic() + timeout_s):
        return {}
    told: dict[str, int] = json.loads(store.get("hosts"))
    store.set(f"read/{env.rank}", "")
    return told


def measure(hosts: Mapping[str, int], store: Store, env: DistEnv, config: DoctorConfig) -> list[list[str]]:
    """Form a group, and time messages between each pair of hosts, one pair after another; if there are many hosts, between rank 0's
    and each. A collective.

    :param hosts: a rank of each, rank 0's first
    :returns: on rank 0, the rows of a table, for its title and every link
    """
    size = config.mebibytes * 2**20
    timeout = datetime.timedelta(seconds=config.timeout)
    with rendezvous_errors(env):
        dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
    links = [["from", "to", "latency", "bandwidth"]]
    for (first, sender), (second, receiver) in itertools.combinations(hosts.items(), 2):
        if sender > 0 and len(hosts) > MOST_PAIRS_OF:
            continue
        seconds = torch.zeros(2, dtype=torch.float64)
        if env.rank in (sender, receiver):
            other = receiver if env.rank == sender else sender
            seconds[0] = _median_seconds(ROUND_TRIPS, 1, env.rank == sender, other) / 2
            seconds[1] = _median_seconds(TRANSFERS, size, env.rank == sender, other)
        dist.broadcast(seconds, sender)
        latency, large = seconds.tolist()
        speed = size / max(large - latency, 1e-9)
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


def report(problems: Sequence[str], everyone: Mapping[int, Facts], env: DistEnv) -> str:
    """The problems, the software, and a table of the ranks."""
    lines = [f"wrong: {problem}" for problem in problems] or ["nothing is wrong"]
    facts = everyone[0]
    hosts = len({_host_of(facts) for facts in everyone.values()})
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if "RANK" in os.environ else "nowhere"
    lines.append(
        f"started by {facts['started by']}: {len(everyone)} of {env.world_size} ranks on {hosts} host{'s' * (hosts > 1)}, "
        f"which meet at {where}"
    )
    lines.append(f"rank 0 has {', '.join(f'{name} {facts[name]}' for name in software())}")
    rows = [["rank", *OWN], *([str(rank), *(facts[name] for name in OWN)] for rank, facts in everyone.items())]
    return "\n".join([*lines, "", *_aligned(rows)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


if __name__ == "__main__":
    main()
