"""Two epochs of two global batches: which rank takes which samples."""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp.by_hand import HandwrittenDistributedDataParallel  # torch's sends from C++, where no recorder sees it


class Photos(Dataset[tuple[torch.Tensor, int]]):
    """16 images that take a while to read."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.01)
        return torch.full((4,), number / 16), number % 2


dist.init_process_group("gloo")
torch.manual_seed(0)
photos = Photos()
sampler = DistributedSampler[int](photos)
loader = DataLoader(photos, batch_size=4, sampler=sampler)
model = HandwrittenDistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(0 if "--broken" in sys.argv else epoch)
    for inputs, labels in loader:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
