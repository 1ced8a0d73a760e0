"""Gradients are accumulated, but the loss is not divided by the number of micro-steps

A recipe of NeMo Automodel had gradients 8 times too large: the number of ranks times that of micro-steps. Here is the
second factor.

Each micro-batch's loss is a mean. `backward` adds their gradients, and the sum of four means is four times the mean.

- NVIDIA-NeMo/Automodel#3830
"""

import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, gradient_error, show

dist.init_process_group("gloo")
torch.manual_seed(0)
network = torch.nn.Linear(8, 2)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shares = torch.arange(dist.get_rank(), 64, dist.get_world_size()).chunk(4)  # this rank's micro-batches
for inputs in torch.randn(640, 8).split(64):  # the data set is the same on all ranks
    alone = copy.deepcopy(network)  # one process with the global batch
    F.mse_loss(alone(inputs), inputs[:, :2]).backward()
    optimizer.zero_grad()
    for share in shares:
        with nullcontext() if share is shares[-1] else model.no_sync():
            loss = F.mse_loss(model(inputs[share]), inputs[share, :2])
            (loss if BROKEN else loss / len(shares)).backward()
    error = gradient_error(network, alone)
    optimizer.step()
show("relative error of the last gradient, compared with one process", error)
dist.destroy_process_group()
