"""Weighted sampling vanishes with a second GPU: a DistributedSampler replaces the weighted sampler

A framework silently put its own sampler in the place of the one that it was given.

DistributedSampler knows no weights. Here all ranks draw the same weighted order, and each takes its share of it.

- Lightning-AI/pytorch-lightning#1995
- allenai/rslearn#182
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from ddp.museum.exhibit import BROKEN, gathered, show, train

dist.init_process_group("gloo")
torch.manual_seed(0)
labels = (torch.arange(96) % 12 == 0).long()  # one sample in 12 is of the rare class
dataset = TensorDataset(torch.randn(96, 4), labels)
weights = (1 + 10 * labels).tolist()  # half of the draws shall be of the rare class
sampler = DistributedSampler[int](dataset)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen: list[int] = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    generator = torch.Generator().manual_seed(epoch)  # alike on all ranks: they draw one order together
    weighted = WeightedRandomSampler(weights, 96, generator=generator)
    share = sampler if BROKEN else list(weighted)[dist.get_rank() :: dist.get_world_size()]
    train(model, optimizer, DataLoader(dataset, batch_size=8, sampler=share))
    seen += share
show("share of the rare class among the samples, 0.5 asked for", labels[gathered(seen)].float().mean().item())
dist.destroy_process_group()
