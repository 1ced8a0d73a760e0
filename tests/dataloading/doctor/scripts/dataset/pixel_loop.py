"""A stream of drawings, made black and white pixel by pixel in Python."""

import random

import torch
from engine import train
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Drawings(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for number in range(worker.id, 320, worker.num_workers):
            yield self.draw(random.Random(number)), number % 10

    def draw(self, rng):
        grey = rng.randbytes(64 * 64)
        image = torch.zeros(16, 16)
        for place, value in enumerate(grey):
            image[place // 256, place % 16] += value > 127  # <- planted
        return image


loader = DataLoader(Drawings(), batch_size=16, num_workers=2)
train(loader)
