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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, samples, show, train

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset, test = samples(64), samples(21)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler[int](dataset))
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, optimizer, loader)
exact = range(dist.get_rank(), len(test), dist.get_world_size())
counts = torch.zeros(2)
with torch.no_grad():
    for inputs, labels in DataLoader(test, sampler=DistributedSampler[int](test) if BROKEN else exact):
        correct = model(inputs).argmax(1) == labels
        counts += torch.tensor([correct.sum(), len(correct)])
dist.all_reduce(counts)
show("samples that the accuracy counts, of 21", counts[1].item())
dist.destroy_process_group()
