"""Clips come from a cache near by; those that it has lost come from an archive, which takes its time."""

import time

import torch
from engine import train
from torch.utils.data import DataLoader, Dataset


class Clips(Dataset):
    def __len__(self):
        return 2400

    def __getitem__(self, index):
        if index % 80 == 3:
            time.sleep(0.9)  # <- planted
        time.sleep(0.002)
        return torch.full((3, 16, 16), index % 7), index % 10


loader = DataLoader(Clips(), batch_size=8, shuffle=True, num_workers=4)  # <- planted
train(loader)
