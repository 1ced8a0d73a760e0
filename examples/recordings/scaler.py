"""Three steps in fp16, with an overflow on rank 1 in the second."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.by_hand import HandwrittenDistributedDataParallel  # torch's sends from C++, where no recorder sees it

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = HandwrittenDistributedDataParallel(torch.nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for step in range(3):
    inputs = torch.randn(16, 64)
    if step == 1 and dist.get_rank() == 1:
        inputs[0] = 60_000.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(inputs), inputs[:, :16])
    scaler.scale(loss).backward()
    if "--broken" not in sys.argv:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
dist.destroy_process_group()
