"""All epochs have the same order, because the sampler is not told the epoch

Every epoch went through the samples in one and the same order. A guide to distributed training had this bug, too.

DistributedSampler shuffles by (seed, epoch), so that the ranks agree. Its epoch stays 0 without `set_epoch`.

- pytorch/pytorch#31771
- LambdaLabsML/distributed-training-guide#40
"""

from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, samples, start, train

start()
dataset = samples(64)
sampler = DistributedSampler[int](dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)  # audit: same-order
model, optimizer = ddp_and_sgd()
orders = set()
for epoch in range(4):
    if not BROKEN:
        sampler.set_epoch(epoch)
    orders.add(tuple(sampler))
    train(model, optimizer, loader)
finish("distinct orders in 4 epochs", len(orders))
