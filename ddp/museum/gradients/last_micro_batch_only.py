"""Gradients are accumulated by hand, but each micro-step clears what was there: all micro-batches but one are lost

DeepSpeed's ZeRO-2 did that when its configuration said one micro-step and the training loop made several. Re-enacted.

Each backward pass is then the boundary of a step, and a boundary resets the accumulated gradient.

- allenai/open-instruct#1498
- deepspeedai/DeepSpeed#7985 (a relative: the last micro-batch misses the reduction)
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
    for share in shares:
        if BROKEN or share is shares[0]:
            optimizer.zero_grad()
        with nullcontext() if share is shares[-1] else model.no_sync():
            (F.mse_loss(model(inputs[share]), inputs[share, :2]) / len(shares)).backward()
    error = gradient_error(network, alone)
    optimizer.step()
show("relative error of the last gradient, compared with one process", error)
dist.destroy_process_group()
