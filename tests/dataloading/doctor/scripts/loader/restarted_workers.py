"""Short epochs, and workers that read a large vocabulary when they start."""

import torch
from engine import train
from torch.utils.data import DataLoader, Dataset

vocabulary = {}


def read_vocabulary(worker):
    vocabulary.update((f"word{number}", number % 97) for number in range(1_000_000))


class Sentences(Dataset):
    def __len__(self):
        return 1280

    def __getitem__(self, index):
        words = [f"word{(index * 31 + place) % 1_000_000}" for place in range(64)]
        return torch.tensor([vocabulary[word] for word in words]), index % 10


loader = DataLoader(  # <- planted
    Sentences(), batch_size=32, shuffle=True, num_workers=2, worker_init_fn=read_vocabulary
)
train(loader, epochs=5)
