"""The flag that switches averaging on is set after the forward pass: only one of four micro-batches is averaged

A GPT-2 reproduction accumulated gradients like this. The loss at step 250 was 6.43 instead of 6.16.

DDP's `forward` reads `require_backward_grad_sync`; the backward pass does not read it again. Each micro-step therefore
uses the flag of the one before, and only the first of a step is averaged.

- karpathy/build-nanogpt#30
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, show, spread

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank has samples of its own, and DDP sends the weights of rank 0
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    for micro_step in range(4):
        inputs = torch.randn(16, 8)
        if not BROKEN:
            model.require_backward_grad_sync = micro_step == 3
        loss = F.mse_loss(model(inputs), inputs[:, :2]) / 4
        if BROKEN:
            model.require_backward_grad_sync = micro_step == 3
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
show("largest difference of a weight between ranks", spread(model))
dist.destroy_process_group()
