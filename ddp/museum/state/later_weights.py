"""An asynchronous checkpoint holds the weights of a later step, because training goes on before they are copied

torch's own had this bug. Other libraries wrote step 2.0 beside weights of step 1, or the first weights each time.

A state dict refers to the live weights. A thread that writes it later writes what they are by then.

- pytorch/pytorch#144657
- NVIDIA/nvidia-resiliency-ext#376, NVIDIA-NeMo/RL#3312
"""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from threading import Event

import torch

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, shared_folder, start, train

disk, writer = Event(), ThreadPoolExecutor(1)


def write(weights: dict[str, torch.Tensor], path: Path) -> None:
    disk.wait()  # The disk is slow.
    torch.save(weights, path)  # audit: later-weights


rank, ranks = start()
model, optimizer = ddp_and_sgd()
with shared_folder() as folder:
    path = folder / f"{rank}.pt"  # Each rank writes a file of its own.
    train(model, optimizer, batches())
    at_call = deepcopy(model.state_dict())
    writer.submit(write, model.state_dict() if BROKEN else at_call, path)
    train(model, optimizer, batches())
    disk.set()
    writer.shutdown()
    distance = torch.dist(torch.load(path)["module.weight"], at_call["module.weight"])
finish("distance of saved weights", distance.item())
