"""A model in shards in a training loop of one's own. Killed and started again, on any number of ranks, it continues.

torchrun --nproc_per_node=2 own_loop_sharded.py 30 my-shards
"""

import gc
import sys

import torch.distributed as dist
import torch.distributed.nn.functional  # torch imports it later, and it would keep a group that is there by then
from torch import nn

from ddp.checkpoint import load, load_sharded, prune, save_sharded
from ddp.sharded import clip_grad_norm_, shard

steps, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = shard(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)), stage=3)
optimizer = torch.optim.AdamW(model.parameters())  # of this rank's shards
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
if checkpoint := load_sharded(folder, model, optimizer):  # None at the first start
    scheduler.load_state_dict(load(checkpoint.path, "scheduler"))
for step in range(checkpoint.step if checkpoint else 0, steps):
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))[dist.get_rank() :: dist.get_world_size()]
    nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % 10 == 0:
        save_sharded(folder, step + 1, model, optimizer, scheduler=scheduler.state_dict())  # each rank writes its part
        if dist.get_rank() == 0:
            prune(folder, keep_last=2)
with model.gathered():
    weights = sum(p.double().sum().item() for p in model.module.parameters())
print(f"rank {dist.get_rank()}: sum of the weights {weights!r}", flush=True)
del model, optimizer, scheduler
gc.collect()  # with the model go the group's threads: one that is busy while Python shuts down aborts the process
dist.destroy_process_group()
