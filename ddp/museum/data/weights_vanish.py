"""Weighted sampling vanishes with a second GPU: a DistributedSampler replaces the weighted sampler

A framework silently put its own sampler in the place of the one that it was given.

DistributedSampler knows no weights. Here all ranks draw the same weighted order, and each takes its share of it.

- Lightning-AI/pytorch-lightning#1995
- allenai/rslearn#182
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gathered, start, train

rank, ranks = start()
labels = (torch.arange(96) % 12 == 0).long()  # one sample in 12 is of the rare class
dataset = TensorDataset(torch.randn(96, 8), labels)
weights = (1 + 10 * labels).tolist()  # half of the draws shall be of the rare class
sampler = DistributedSampler[int](dataset)
model, optimizer = ddp_and_sgd()
seen: list[int] = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    generator = torch.Generator().manual_seed(epoch)  # alike on all ranks: they draw one order together
    weighted = WeightedRandomSampler(weights, 96, generator=generator)  # audit: weights-vanish
    share = sampler if BROKEN else list(weighted)[rank::ranks]
    train(model, optimizer, DataLoader(dataset, batch_size=8, sampler=share))
    seen += share
finish("share of the rare class among the samples, 0.5 asked for", labels[gathered(seen)].float().mean().item())
