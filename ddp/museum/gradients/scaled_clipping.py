"""Gradients are clipped before they are unscaled: clipping sees them 65,536 times too large

An official example of torch trains like this.

GradScaler multiplies the loss by 65,536. The norm is far above any limit, each gradient is clipped, and unscaling then
makes it 65,536 times too small. `unscale_` must come first.

- pytorch/examples#1196 (open)
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, gradient_norm, show

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank has samples of its own, and DDP sends the weights of rank 0
model = DistributedDataParallel(torch.nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for _ in range(10):
    inputs = torch.randn(16, 64) + 1
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), inputs[:, :16].argmax(1))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not BROKEN:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
show("norm of the last gradient, clipped at 1", gradient_norm(model.parameters()).item())
dist.destroy_process_group()
