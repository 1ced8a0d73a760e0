"""All ranks draw the same noise and the same time steps, because each rank seeds its generator alike

Seen in the training of a robot's model in 2026; the first thread is still open. The second explains why another project
gives each rank a seed of its own.

One seed lets all ranks build the same model. After that their generators stay equal: N ranks draw what one would draw.

- Robbyant/lingbot-vla-v2#41
- facebookresearch/deit#150
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, gathered, samples, show

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = samples(64)
sampler = DistributedSampler[int](dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 if BROKEN else 1 + dist.get_rank())  # The model is built; only noise is drawn from here on.
drawn = set()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for clean, _ in loader:
        time, noise = torch.rand(8, 1), torch.randn(8, 4)
        F.mse_loss(model(clean + time * noise), noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        drawn.add(time[0].item())
show("distinct draws, of 24 by two ranks", len(set(gathered(drawn))))
dist.destroy_process_group()
