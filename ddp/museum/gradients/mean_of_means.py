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

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gradient_error, start

rank, ranks = start()
model, optimizer = ddp_and_sgd()
for tokens in torch.randn(320, 8).split(32):  # the data set is the same on all ranks: 2 texts of 16 tokens a step
    labels = (tokens.sum(1) > 0).long()
    labels[4:16] = -100  # the first text is short: the loss ignores its padding
    alone = copy.deepcopy(model.module)  # one process with the global batch
    F.cross_entropy(alone(tokens), labels).backward()
    inputs, labels = tokens.chunk(2)[rank], labels.chunk(2)[rank]
    count = (labels >= 0).float().sum()
    if not BROKEN:
        dist.all_reduce(count)
        count /= ranks  # DDP divides by the world size too
    optimizer.zero_grad()
    (F.cross_entropy(model(inputs), labels, reduction="sum") / count).backward()  # audit: mean-of-means
    error = gradient_error(model, alone)
    optimizer.step()
finish("relative error of the last gradient, compared with one process", error)
