"""All loader workers of all ranks draw the same random crops, because each has a copy of one generator

Long known for NumPy's generator; in October 2025 another project still had it.
A forked worker copies the generator with its state. DataLoader seeds the global generators anew, but no other.

- pytorch/pytorch#5059, pytorch/pytorch#41329, BinItAI/visdet#902
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gathered, start, train


class Crops(TensorDataset):
    generator = torch.Generator()  # each loader worker gets a copy of it

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        generator = self.generator if BROKEN else torch.Generator().manual_seed(64 * epoch + index)  # one per sample
        place = torch.randint(100, (), generator=generator)
        return self.tensors[0][index, place : place + 8], place


start()
dataset = Crops(torch.randn(64, 107))
sampler = DistributedSampler[int](dataset)
model, optimizer = ddp_and_sgd(outputs=100)
drawn: set[tuple[int, ...]] = set()
for epoch in range(3):
    sampler.set_epoch(epoch)
    batches = list(DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2))  # audit: same-crops
    train(model, optimizer, batches)  # the network learns from which place a crop is
    drawn |= {tuple(places.tolist()) for _, places in batches}
finish("distinct batches of crops, of 24", len(set(gathered(drawn))))
