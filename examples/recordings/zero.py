"""Two steps of a sharded network."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.sharded import shard

dist.init_process_group("gloo")
torch.manual_seed(0)
network = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(3)))
model = shard(network, stage=int(sys.argv[1]), units=list(network))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
torch.manual_seed(dist.get_rank())  # each rank has samples of its own
for _ in range(2):
    inputs = torch.randn(96, 384)
    loss = F.mse_loss(model(inputs), inputs)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
