"""Each rank averages over its own tokens, and DDP averages the averages: tokens of long texts count less

Trainers of language models had it: the gradient depends on how the batch is cut into micro-batches and ranks.

The mean of means is the mean only if all counts are equal, and texts differ in length. The divisor must be the count
of the whole global batch.

- huggingface/transformers#34191, #35438, modelscope/ms-swift#10165
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, gradient_error, show

dist.init_process_group("gloo")
torch.manual_seed(0)
network = torch.nn.Linear(8, 2)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for tokens in torch.randn(320, 8).split(32):  # the data set is the same on all ranks: 2 texts of 16 tokens a step
    labels = (tokens.sum(1) > 0).long()
    labels[4:16] = -100  # the first text is short: the loss ignores its padding
    alone = copy.deepcopy(network)  # one process with the global batch
    F.cross_entropy(alone(tokens), labels).backward()
    inputs, labels = tokens.chunk(2)[dist.get_rank()], labels.chunk(2)[dist.get_rank()]
    count = (labels >= 0).float().sum()
    if not BROKEN:
        dist.all_reduce(count)
        count /= dist.get_world_size()  # DDP divides by the world size too
    optimizer.zero_grad()
    (F.cross_entropy(model(inputs), labels, reduction="sum") / count).backward()
    error = gradient_error(network, alone)
    optimizer.step()
show("relative error of the last gradient, compared with one process", error)
dist.destroy_process_group()
