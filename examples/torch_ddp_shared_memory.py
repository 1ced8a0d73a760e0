"""torch's own DistributedDataParallel on CPUs, with one line more: it averages in shared memory.

On two ranks the bits are the same. The argument plain leaves that line out.
torchrun --nproc_per_node=2 torch_ddp_shared_memory.py
"""

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp.all_reduce import shared_memory_hook

STEPS, BATCH_SIZE, WIDTH = 20, 64, 1024  # the batch of a rank; 2.1 million parameters, 8.4 MB of gradients

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, 2)))
if sys.argv[1:] != ["plain"]:
    model.register_comm_hook(*shared_memory_hook())  # the line; before the first backward pass
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(dist.get_rank())  # each rank has its own samples
seconds = []
for _ in range(STEPS):
    began = time.perf_counter()
    inputs = torch.randn(BATCH_SIZE, WIDTH, generator=generator)
    loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.perf_counter() - began)
weights = nn.utils.parameters_to_vector(model.parameters()).double().sum().item()
step_s = statistics.median(seconds)
print(f"rank {dist.get_rank()}: {1e3 * step_s:.1f} ms a step, sum of the weights {weights!r}", flush=True)
del model, loss  # with them go the group's threads: one that is still busy while Python shuts down aborts the process
dist.destroy_process_group()
