"""Train on sentences: ``python -m textproject.train``."""

from engine import train
from torch.utils.data import DataLoader

from textproject.data import Sentences, pad

if __name__ == "__main__":
    train(DataLoader(Sentences(), batch_size=32, shuffle=True, num_workers=2, collate_fn=pad))
