"""Annotations of a large data set, and workers by spawn, each of which gets a copy in each epoch."""

import torch
from engine import train
from torch.utils.data import DataLoader, Dataset


class Annotated(Dataset):
    def __init__(self):
        self.boxes = {f"image-{number:07}.jpg": [[number, n, 9, 9] for n in range(2)] for number in range(150_000)}

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        boxes = torch.tensor(self.boxes[f"image-{index:07}.jpg"])
        return boxes % 13, index % 10


if __name__ == "__main__":
    data = Annotated()
    loader = DataLoader(data, batch_size=50, shuffle=True, num_workers=2, multiprocessing_context="spawn")  # <- planted
    train(loader, epochs=2)
