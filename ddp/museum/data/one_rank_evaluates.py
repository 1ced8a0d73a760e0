"""The result of one rank's part of the evaluation is reported as the result of the whole

A loss of rank 0 alone was logged as if it were the mean over all ranks.

Each rank evaluates its own samples. Without an all-reduce of the counts, rank 0 reports what it saw itself.

- pytorch/examples#551
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, samples, show, train

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = samples(64)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler[int](dataset))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, optimizer, loader)
test_set = samples(40)
part = range(dist.get_rank(), 40, dist.get_world_size())
counts = torch.zeros(2)
with torch.no_grad():
    for inputs, labels in DataLoader(test_set, batch_size=10, sampler=part):
        counts += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
if not BROKEN:
    dist.all_reduce(counts)
inputs, labels = test_set.tensors
accuracy = (model(inputs).argmax(1) == labels).float().mean()  # of all samples, for comparison
show("error of the reported accuracy", abs(counts[0] / counts[1] - accuracy).item())
dist.destroy_process_group()
