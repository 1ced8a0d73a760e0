"""The job of the table, for the scripts of libraries: its arguments, data and network. torch_alone.py has all of it in one file."""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=12)  # of a rank and micro-step
    parser.add_argument("--micro-steps", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    return parser.parse_args()


def data_sets() -> tuple[TensorDataset, TensorDataset]:
    """Samples to train on and to evaluate with, drawn from torch's generator, which the library has seeded."""
    inputs = torch.randn(176, 8)
    labels = (inputs.sum(1) > 0).long()
    return TensorDataset(inputs[:144], labels[:144]), TensorDataset(inputs[144:], labels[144:])


def network(dropout: float) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 2))
