"""Readings of sensors, all in one tensor, out of which each sample is taken alone."""

import torch
from engine import train
from torch.utils.data import DataLoader, Dataset


class InMemory(Dataset):
    def __init__(self):
        self.readings = torch.randint(0, 256, (200_000, 64), dtype=torch.uint8)
        self.labels = torch.arange(200_000) % 10

    def __len__(self):
        return len(self.readings)

    def __getitem__(self, index):
        return self.readings[index], self.labels[index]  # <- planted


loader = DataLoader(InMemory(), batch_size=500, shuffle=True, num_workers=1)  # <- planted
train(loader, epochs=3)
