"""An iterable data set is read once by each worker of each rank, from its beginning to its end

People met it with streamed data sets and with record files.

No sampler divides an iterable data set: each worker of each rank has a copy, and must skip the parts of the others.

- huggingface/datasets#5360, vahidk/tfrecord#78
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gathered, samples, start, train


class Records(IterableDataset[tuple[torch.Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        worker = get_worker_info()
        assert worker
        first, step = dist.get_rank() * worker.num_workers + worker.id, dist.get_world_size() * worker.num_workers
        yield from (records[number] for number in (range(64) if BROKEN else range(first, 64, step)))


start()
records = samples(64)
model, optimizer = ddp_and_sgd()
batches = list(DataLoader(Records(), batch_size=4, num_workers=2))  # audit: read-by-all
train(model, optimizer, batches)
finish("how often a record was read", sum(gathered(len(inputs) for inputs, _ in batches)) / 64)
