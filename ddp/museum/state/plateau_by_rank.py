"""The ranks train at different learning rates, because each lowers its own when its own loss is on a plateau

ReduceLROnPlateau was stepped with the loss of each rank's own samples.

DDP averages gradients, not learning rates: two ranks that multiply the same gradient by different rates drift apart.

- rmchurch/disruptcnn#3
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, samples, show, spread

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = samples(64)
sampler = DistributedSampler[int](dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    if not BROKEN:
        dist.all_reduce(total)
    scheduler.step(total)
show("largest difference of a weight between ranks", spread(model))
dist.destroy_process_group()
