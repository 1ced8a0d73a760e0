"""A log of clicks, kept as a Python list of lists of strings."""

import torch
from engine import train
from torch.utils.data import DataLoader, Dataset


class Clicks(Dataset):
    def __init__(self):
        self.rows = [[f"{row * column % 997}.5" for column in range(12)] for row in range(250_000)]  # <- planted

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]  # <- planted
        return torch.tensor([float(cell) for cell in row]), index % 10


loader = DataLoader(Clicks(), batch_size=256, shuffle=True, num_workers=2)
train(loader)
