"""The hand-written DistributedDataParallel around a model of one's own: mixed precision, accumulation, clipping.

torchrun --nproc_per_node=2 own_loop_by_hand.py
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ddp.by_hand import HandwrittenDistributedDataParallel

STEPS, MICRO_STEPS, BATCH_SIZE = 20, 2, 32  # the batch of a rank and micro-step

dist.init_process_group("gloo")
torch.manual_seed(0)
generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own samples
model = HandwrittenDistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")
for _ in range(STEPS):
    for micro_step in range(MICRO_STEPS):
        inputs = torch.randn(BATCH_SIZE, 8, generator=generator)
        labels = (inputs.sum(1) > 0).long()
        last = micro_step == MICRO_STEPS - 1  # only its backward pass averages the gradients over the ranks
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(inputs), labels) / MICRO_STEPS
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # first: the norm of scaled gradients means nothing
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
weights = nn.utils.parameters_to_vector(model.parameters()).double().sum().item()
print(f"rank {dist.get_rank()}: loss {MICRO_STEPS * loss.item():.3f}, sum of the weights {weights!r}", flush=True)
del model, loss  # with them go the group's threads: one that is still busy while Python shuts down aborts the process
dist.destroy_process_group()
