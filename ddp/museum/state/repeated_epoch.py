"""A resumed run repeats the order of epoch 0, because its sampler does not learn in which epoch the run is

Runs that two frameworks resumed began again with the order of the first epoch, or went on in the wrong order.

The order is made from (seed, epoch), and a fresh sampler is in epoch 0. The epoch has to be saved and set again.

- Lightning-AI/pytorch-lightning#21938
- huggingface/accelerate#3996, #4071, #4238
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, samples, shared_folder, start, train

rank, ranks = start()
dataset = samples(64)
orders = set()
with shared_folder() as folder:
    for resumed in (False, True):  # Each start of the job trains one epoch and saves.
        model, optimizer = ddp_and_sgd()
        sampler = DistributedSampler[int](dataset)
        epoch = 0
        if resumed:
            weights, epoch = torch.load(folder / "state.pt")
            model.load_state_dict(weights)
        sampler.set_epoch(epoch)
        orders.add(tuple(sampler))
        train(model, optimizer, DataLoader(dataset, batch_size=8, sampler=sampler))  # audit: same-order
        if rank == 0:
            state = (model.state_dict(), 0 if BROKEN else epoch + 1)  # the epoch to resume with
            torch.save(state, folder / "state.pt")
        dist.barrier()
finish("distinct orders in two epochs", len(orders))
