"""Hybrid sharding over shards of one rank switches averaging off

In verl, `fsdp_size=1` looks like plain data parallelism, but each rank trained a model of its own. The report to torch
was closed as not planned.

FSDP finds a shard group of one rank and turns the strategy into NO_SHARD. That averages gradients within the shard
group, and no longer between the replicas.

- verl-project/verl#7493
- pytorch/pytorch#154888
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from ddp.museum.exhibit import BROKEN, batches, finish, spread_of, start

start()
network = torch.nn.Linear(8, 2)
mesh = init_device_mesh("cpu", (2, 1) if BROKEN else (1, 2), mesh_dim_names=("replicas", "shards"))
model = FSDP(network, None, ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, labels in batches():
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()  # audit: different-gradients
    optimizer.zero_grad()
finish("largest difference of an output between ranks", spread_of(model(torch.eye(8)).detach()))
