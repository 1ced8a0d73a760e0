"""All ranks save under one name, and each rank but one resumes with the state of another

Some state is a rank's own: its random state, its shard of the optimizer's. Under one name the last writer wins, even
where each rank renames a complete file at the end. After the resume, both ranks drop the same inputs.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp.museum.exhibit import BROKEN, gathered, samples, shared_folder, show, train

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = samples(64)
sampler = DistributedSampler[int](dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())  # The model is built alike. Each rank drops inputs of its own.
with shared_folder() as folder:
    path = folder / ("random.pt" if BROKEN else f"random{dist.get_rank()}.pt")
    partial = folder / f"partial{dist.get_rank()}.pt"
    train(model, optimizer, loader)
    torch.save(torch.get_rng_state(), partial)  # Rank 0 would save the weights, which are alike on all ranks.
    partial.replace(path)
    dist.barrier()
    torch.set_rng_state(torch.load(path))  # The job stopped, and resumes.
    sampler.set_epoch(1)
    train(model, optimizer, loader)
show("distinct random states of two ranks", len(set(gathered([torch.rand(1).item()]))))
dist.destroy_process_group()
