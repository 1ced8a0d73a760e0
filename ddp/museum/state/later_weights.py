"""An asynchronous checkpoint holds the weights of a later step, because training goes on before they are copied

torch's own had this bug. Other libraries wrote step 2.0 beside weights of step 1, or the first weights each time.

A state dict refers to the live weights. A thread that writes it later writes what they are by then.

- pytorch/pytorch#144657
- NVIDIA/nvidia-resiliency-ext#376, NVIDIA-NeMo/RL#3312
"""

from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, samples, shared_folder, show, train

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = samples(64)
sampler = DistributedSampler[int](dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
disk, writer = Future[None](), ThreadPoolExecutor(1)
writer.submit(disk.result)  # The writer's thread waits for the disk.
with shared_folder() as folder:
    path = folder / f"{dist.get_rank()}.pt"  # Each rank writes a file of its own.
    train(model, optimizer, loader)
    at_call = deepcopy(model.state_dict())
    writer.submit(torch.save, model.state_dict() if BROKEN else at_call, path)
    sampler.set_epoch(1)
    train(model, optimizer, loader)
    disk.set_result(None)
    writer.shutdown()
    show("distance of saved weights", torch.dist(torch.load(path)["module.weight"], at_call["module.weight"]).item())
dist.destroy_process_group()
