"""The optimizer is built before the model is sharded: it owns parameters that the model does not use, and nothing is trained

People who used FSDP through accelerate saw a loss that stayed flat.

`fully_shard` replaces the parameters. The optimizer keeps the old ones, which never get a gradient, and it skips a
parameter without one.

- pytorch/pytorch#107843
- huggingface/accelerate#3256, #2665
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp.museum.exhibit import BROKEN, show

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
parameters = list(model.parameters())
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(parameters if BROKEN else model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())  # each rank has samples of its own
inputs = torch.randn(16, 8, generator=data)
losses = []
for _ in range(10):
    loss = F.mse_loss(model(inputs), inputs[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
show("steps that did not change the loss, of 9", losses[1:].count(losses[0]))
dist.destroy_process_group()
