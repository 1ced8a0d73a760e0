"""An iterable data set is read N x W times: by each worker of each rank, from its beginning to its end

People met it with streamed data sets and with record files.

No sampler divides an iterable data set: each worker of each rank has a copy, and must skip the parts of the others.

- huggingface/datasets#5360, vahidk/tfrecord#78
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp.museum.exhibit import BROKEN, gathered, samples, show


class Records(IterableDataset[tuple[torch.Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        worker = get_worker_info()
        assert worker
        first, step = dist.get_rank() * worker.num_workers + worker.id, dist.get_world_size() * worker.num_workers
        yield from (records[number] for number in (range(64) if BROKEN else range(first, 64, step)))


dist.init_process_group("gloo")
torch.manual_seed(0)
records = samples(64)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
read = 0
for inputs, labels in DataLoader(Records(), batch_size=4, num_workers=2):
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    read += len(inputs)
show("how often a record was read", sum(gathered([read])) / 64)
dist.destroy_process_group()
