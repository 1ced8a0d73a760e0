"""The learning rate falls N times too fast, because the scheduler is stepped once for each process

With N GPUs, the schedule was over after 1/N of the steps. Several training scripts of several projects had this bug.

A library steps the scheduler N times per step, for schedules that count the steps of one process. These schedules
count the optimizer's steps already.

- huggingface/accelerate#2926, #1398
- huggingface/diffusers#3954
- Lightricks/LTX-Video-Trainer#67
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, samples, show

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = samples(64)
sampler = DistributedSampler[int](dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20)  # zero after the last step
idle = 0
for epoch in range(5):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        idle += scheduler.get_last_lr() == [0]
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(dist.get_world_size() if BROKEN else 1):
            scheduler.step()
show("steps with a learning rate of zero, of 20", idle)
dist.destroy_process_group()
