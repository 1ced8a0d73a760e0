"""A model in shards in a training loop of one's own. Killed and started again, on any number of ranks, it continues.

torchrun --nproc_per_node=2 own_loop_sharded.py 30 my-shards
"""

import gc
import sys

import torch.distributed as dist
import torch.distributed.nn.functional  # torch imports it later, and it would keep a group that is there by then

from ddp.checkpoint import load
from ddp.checkpoint.sharded_state import load_sharded, save_sharded
from ddp.sharded import clip_grad_norm_, shard

steps, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = shard(torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)), stage=3)
optimizer = torch.optim.AdamW(model.parameters())  # of this rank's shards
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
if checkpoint := load_sharded(folder, model, optimizer):
    scheduler.load_state_dict(load(checkpoint.path, "scheduler"))
for step in range(checkpoint.step if checkpoint else 0, steps):
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(step))[dist.get_rank() :: dist.get_world_size()]
    torch.nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        save_sharded(folder, step + 1, model, optimizer, scheduler=scheduler.state_dict())  # each rank writes its part
with model.gathered() as module:
    weights = sum(p.double().sum().item() for p in module.parameters())
print(f"rank {dist.get_rank()}: sum of the weights {weights!r}", flush=True)
model.close()
del model, module, optimizer, scheduler  # with them go the group's threads: one that is busy at exit aborts the process
gc.collect()
dist.destroy_process_group()
