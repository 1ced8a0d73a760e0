"""Two steps of four micro-steps: gradients are sent once per step."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.by_hand import HandwrittenDistributedDataParallel  # torch's sends from C++, where no recorder sees it

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = HandwrittenDistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
backward_only = "--broken" in sys.argv
for _ in range(2):
    for micro_step in range(4):
        inputs = torch.randn(64, 256)
        quiet = nullcontext if micro_step == 3 else model.no_sync
        with nullcontext() if backward_only else quiet():
            loss = F.mse_loss(model(inputs), inputs) / 4
            with quiet() if backward_only else nullcontext():
                loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
