"""Two processes find each other: a store, a rendezvous, a process group, and a first sum."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if rank == 1:
    time.sleep(0.3)  # this process starts late
store = dist.TCPStore(  # type: ignore[attr-defined]  # rank 0 serves it, and all are its clients
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    world_size,
    is_master=rank == 0,
    timeout=timedelta(seconds=60),
    wait_for_workers=False,
)
store.set(f"address of rank {rank}", f"port {40_000 + rank}")
other = store.get(f"address of rank {1 - rank}")  # waits until the key is there
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
