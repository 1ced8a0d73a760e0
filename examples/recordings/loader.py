"""Eight batches from two workers; one sample takes long."""

import sys
import time

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Photos(Dataset[Tensor]):
    """32 images. Number 9 is slow to read."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(0.12 if number == 9 else 0.005)
        return torch.full((3, 32, 32), number)


loader = DataLoader(Photos(), batch_size=4, num_workers=2, in_order="--any-order" not in sys.argv)
for _ in loader:
    time.sleep(0.01)  # a training step
