"""The evaluation counts samples twice, because the sampler pads the data set until all ranks have equally many

The result changed with the number of ranks, and in one project even from run to run.

DistributedSampler repeats the first samples at the end. Training hardly notices it; an accuracy is wrong by them.

- pytorch/pytorch#25162
- pytorch/vision#4559
- roboflow/rf-detr#1507
- areal-project/AReaL#1096
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, loader, samples, start, train

rank, ranks = start()
test = samples(21)
model, optimizer = ddp_and_sgd()
train(model, optimizer, loader())
exact = range(rank, len(test), ranks)
tests = DataLoader(test, sampler=DistributedSampler[int](test) if BROKEN else exact)  # audit: evaluation-counts-twice
counts = torch.zeros(2)
with torch.no_grad():
    for inputs, labels in tests:
        correct = model(inputs).argmax(1) == labels
        counts += torch.tensor([correct.sum(), len(correct)])
dist.all_reduce(counts)
finish("samples that the accuracy counts, of 21", counts[1].item())
