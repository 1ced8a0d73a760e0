"""The optimizer is built before the model is sharded: it owns parameters that the model does not use, and nothing is trained

People who used FSDP through accelerate saw a loss that stayed flat.

`fully_shard` replaces the parameters. The optimizer keeps the old ones, which never get a gradient, and it skips a
parameter without one.

- pytorch/pytorch#107843
- huggingface/accelerate#3256, #2665
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp.museum.exhibit import BROKEN, batches, finish, start

rank, ranks = start()
model = torch.nn.Linear(8, 2)
parameters = list(model.parameters())
fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
optimizer = torch.optim.SGD(parameters if BROKEN else model.parameters(), lr=0.1)
inputs, labels = next(batches())  # the same in each step, so that only the weights change the loss
losses = []
for _ in range(10):
    loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # audit: optimizer-of-other-parameters
    losses.append(loss.item())
finish("steps that did not change the loss, of 9", losses[1:].count(losses[0]))
