"""The model is converted after it was wrapped: DDP's hooks are lost, and nothing is averaged any more

It was reported for a model that was moved to the CPU and back. A conversion to another dtype does the same.

DDP's hooks hang on the autograd node that accumulates a parameter's gradient. Another dtype or device gives the
parameter a new node, without hooks. So convert and move first, and wrap then.

- pytorch/pytorch#104336
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, show, spread

dist.init_process_group("gloo")
torch.manual_seed(0)
network = torch.nn.Linear(8, 2)
model = DistributedDataParallel(network).double() if BROKEN else DistributedDataParallel(network.double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())  # each rank has samples of its own
for _ in range(10):
    inputs = torch.randn(16, 8, generator=data, dtype=torch.double)
    labels = (inputs.sum(1) > 0).long()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
show("largest difference of a weight between ranks", spread(model))
dist.destroy_process_group()
