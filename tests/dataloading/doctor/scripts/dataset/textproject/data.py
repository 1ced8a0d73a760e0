"""Sentences of many lengths, and a collate function that pads them number by number."""

import torch
from torch.utils.data import Dataset


class Sentences(Dataset):
    def __len__(self):
        return 8000

    def __getitem__(self, index):
        return torch.arange(index % 200 + 100), index % 10


def pad(samples):
    longest = max(len(words) for words, _ in samples)
    batch = torch.zeros(len(samples), longest)
    for row, (words, _) in enumerate(samples):
        for place, word in enumerate(words):
            batch[row, place] = word % 97  # <- planted
    return batch, torch.tensor([label for _, label in samples])
