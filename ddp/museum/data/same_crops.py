"""All loader workers of all ranks draw the same random crops, because each has a copy of one generator

Long known for NumPy's generator; in October 2025 another project still had it.
A forked worker copies the generator with its state. DataLoader seeds the global generators anew, but no other.

- pytorch/pytorch#5059, pytorch/pytorch#41329, BinItAI/visdet#902
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp.museum.exhibit import BROKEN, gathered, show


class Crops(TensorDataset):
    generator = torch.Generator()  # each loader worker gets a copy of it

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        generator = self.generator if BROKEN else torch.Generator().manual_seed(64 * epoch + index)  # one per sample
        start = torch.randint(100, (), generator=generator)
        return self.tensors[0][index, start : start + 8], start


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = Crops(torch.randn(64, 107))
sampler = DistributedSampler[int](dataset)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn = set()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for crops, starts in DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2):
        torch.nn.functional.mse_loss(model(crops), crops).backward()
        optimizer.step()
        optimizer.zero_grad()
        drawn.add(tuple(starts.tolist()))
show("distinct batches of crops, of 24", len(set(gathered(drawn))))
dist.destroy_process_group()
