"""Scripts that the tests audit, by name; each is written to a file of its own."""

from __future__ import annotations

GROUP = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

def train(steps=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        F.cross_entropy(model(torch.randn(16, 8)), torch.randint(2, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
"""

RIGHT = (
    GROUP
    + """
import ddp  # a module of the script's own, beside it
assert ddp.OWN
dist.init_process_group("gloo")
weights = torch.nn.utils.parameters_to_vector(train().parameters())
if dist.get_rank() == 0:
    torch.save([weights.detach(), torch.get_rng_state()], sys.argv[1])
dist.destroy_process_group()
"""
)

SPAWNS = (
    GROUP
    + """
import torch.multiprocessing as mp

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train()
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model.module(torch.randn(16, 8)), torch.randint(2, (16,))).backward()  # around
    optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""
)

RAISES = GROUP + 'dist.init_process_group("gloo")\nraise RuntimeError("lost")\n'
HANGS = GROUP + 'dist.init_process_group("gloo")\nif dist.get_rank() == 0:\n    time.sleep(1000)\ntrain()\n'
WITHOUT_GROUP = "import torch\n"
WITHOUT_STEP = GROUP + 'dist.init_process_group("gloo")\ntrain(0)\ndist.destroy_process_group()\n'
