"""Each rank clips its shard of the gradient by the norm of that shard alone

In torchtitan, people saw another norm on each rank. The shards are scaled by different factors, so that the gradient
changes its direction.

A rank sees only the parameters that it owns (here as in ZeRO-1). The norm needs the sum of squares over all ranks.

- pytorch/pytorch#72548
- pytorch/torchtitan#766
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, batches, finish, gradient_norm, start

rank, ranks = start()
model = DistributedDataParallel(torch.nn.Linear(8, 2))
owned = list(model.parameters())[rank]  # rank 0 updates the weight, rank 1 the bias
optimizer = torch.optim.SGD([owned], lr=0.1)
for inputs, _ in batches():
    model.zero_grad()  # the optimizer's zero_grad would leave what the other rank owns
    F.mse_loss(model(inputs), 100 * inputs[:, :2]).backward()
    if BROKEN:
        torch.nn.utils.clip_grad_norm_(owned, 1.0)  # audit: norms-differ
    else:
        dist.all_reduce(square := gradient_norm([owned]) ** 2)
        torch.nn.utils.clip_grads_with_norm_(owned, 1.0, square.sqrt())
    optimizer.step()
    for owner, parameter in enumerate(model.parameters()):
        dist.broadcast(parameter.detach(), src=owner)
dist.all_reduce(square := gradient_norm([owned]) ** 2)
finish("norm of the last gradient, clipped at 1", square.sqrt().item())
