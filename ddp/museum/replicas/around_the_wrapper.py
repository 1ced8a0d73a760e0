"""The forward pass goes around the wrapper: nothing is averaged, and each rank trains a model of its own

Two published code bases trained like this: reinforcement learning that called `model.module(...)` for one loss, and the action
head of a robot's model. The loss went down, and rank 0's weights, learned from its own samples alone, were saved.

DDP finds the end of a backward pass by the forward pass that its own `forward` saw. It sees no call of `model.module`.

- jingyaogong/minimind#853, fixed in #854
- moojink/openvla-oft#160
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, show, spread

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())  # each rank has samples of its own
for _ in range(10):
    inputs = torch.randn(16, 8, generator=data)
    labels = (inputs.sum(1) > 0).long()
    outputs = model.module(inputs) if BROKEN else model(inputs)
    F.cross_entropy(outputs, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
show("largest difference of a weight between ranks", spread(model))
dist.destroy_process_group()
