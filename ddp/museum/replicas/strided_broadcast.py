"""A weight with gaps in memory is broadcast by gloo, and half of it does not arrive

The bug is in today's torch: broadcast, reduce and scatter are affected. Reports go back to 2019; gather was repaired.

gloo sends and receives as many elements as the tensor has, counted from the start of its storage, gaps included. The
rows at the end stay what they were.

- pytorch/pytorch#192920 (open)
- pytorch/pytorch#24836, #74809; gather: #158903
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, batches, finish, spread, start, train

rank, ranks = start()
torch.manual_seed(rank)  # each rank has weights of its own until the broadcast
network = torch.nn.Linear(8, 2)
network.weight = torch.nn.Parameter(torch.randn(2, 16)[:, ::2])  # every second input of a larger layer
for parameter in network.parameters():
    weights = parameter.detach() if BROKEN else parameter.detach().contiguous()
    dist.broadcast(weights, src=0)  # audit: strided-tensor
    parameter.data.copy_(weights)
model = DistributedDataParallel(network, init_sync=False)  # the weights are sent already
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, optimizer, batches())
finish("largest difference of a weight between ranks", spread(model))
