"""Embeddings are gathered for a contrastive loss, and the gradient is too small by the number of ranks

Libraries for contrastive learning had gradients that were 1/W of the right ones on W ranks.

`all_gather` is no autograd function: what it returns carries no gradient. Each rank puts its own embeddings back and
gets its share of the gradient. The shares should be added, but DDP averages them.

- lightly-ai/lightly#1977, JohnGiorgi/DeCLUTR#212, lightonai/pylate#111, HobbitLong/SupContrast#26
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gradient_error, start

rank, ranks = start()
model, optimizer = ddp_and_sgd(outputs=4)
for samples in torch.randn(160, 2, 8).split(16):  # the data set is the same on all ranks: two views of each sample
    alone = copy.deepcopy(model.module)  # one process with the global batch
    queries, keys = alone(samples).unbind(1)
    F.cross_entropy(queries @ keys.T, torch.arange(16)).backward()
    own = model(samples.chunk(2)[rank])
    gathered = [torch.empty_like(own), torch.empty_like(own)]
    dist.all_gather(gathered, own.detach())
    gathered[rank] = own
    queries, keys = torch.cat(gathered).unbind(1)
    loss = F.cross_entropy(queries @ keys.T, torch.arange(16))  # audit: gathered-without-gradient
    optimizer.zero_grad()
    (loss if BROKEN else loss * ranks).backward()
    error = gradient_error(model, alone)
    optimizer.step()
finish("relative error of the last gradient, compared with one process", error)
