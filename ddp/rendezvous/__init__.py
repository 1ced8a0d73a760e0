"""How the ranks of a job meet, and leave.

process_group.py   the process group: its store, its errors, its end
launch_facts.py    what every rank must have been started with; the ranks compare it
addresses.py       the interface that leads to the other hosts, and whether MASTER_ADDR is the place to meet
store_prefix.py    one restart does not read the keys of the one before; agent_watch.py: torchrun's agent has died
worker_group.py    ranks that a benchmark starts by itself

    from ddp.rendezvous import find_dist_env, rank_process, rendezvous_store
"""

from __future__ import annotations

from common.distributed.dist_env import DistEnv, find_dist_env
from ddp.rendezvous.process_group import process_group, rank_process, rendezvous_store

__all__ = ["DistEnv", "find_dist_env", "process_group", "rank_process", "rendezvous_store"]
