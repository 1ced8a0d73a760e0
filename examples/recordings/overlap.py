"""Some steps of a network whose gradients travel in several buckets while the backward pass goes on."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.by_hand import HandwrittenDistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank has samples of its own, and rank 0's weights are sent
network = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
model = HandwrittenDistributedDataParallel(network, bucket_cap_mb=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    dist.barrier()  # for the picture: the ranks begin a step together
    inputs = torch.randn(128, 512)
    outputs = model.module(inputs) if "--broken" in sys.argv else model(inputs)
    loss = F.mse_loss(outputs, inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
