"""Vectors in memory, taken in whole batches, and a model that is worth its while."""

import torch
from engine import train
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Vectors(Dataset):
    def __init__(self):
        self.vectors = torch.randn(9000, 512)

    def __len__(self):
        return len(self.vectors)

    def __getitems__(self, indices):
        return self.vectors[indices], torch.tensor(indices) % 10


def as_it_is(batch):
    return batch


model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
loader = DataLoader(Vectors(), batch_size=100, shuffle=True, collate_fn=as_it_is)
train(loader, model=model)
