"""The model is converted after it was wrapped: DDP's hooks are lost, and nothing is averaged any more

It was reported for a model that was moved to the CPU and back. A conversion to another dtype does the same.

DDP's hooks hang on the autograd node that accumulates a parameter's gradient. Another dtype or device gives the
parameter a new node, without hooks. So convert and move first, and wrap then.

- pytorch/pytorch#104336
"""

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, batches, finish, spread, start

start()
network = torch.nn.Linear(8, 2)
model = DistributedDataParallel(network).double() if BROKEN else DistributedDataParallel(network.double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, labels in batches():
    F.cross_entropy(model(inputs.double()), labels).backward()  # audit: hooks-lost
    optimizer.step()
    optimizer.zero_grad()
finish("largest difference of a weight between ranks", spread(model))
