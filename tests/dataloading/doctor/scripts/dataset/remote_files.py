"""A script for torchrun; each sample is a request to a store that answers after some milliseconds."""

import os
import time

import torch
import torch.distributed as dist
from engine import train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Store(Dataset):
    def __len__(self):
        return 800

    def __getitem__(self, index):
        time.sleep(0.015)  # <- planted
        return torch.full((64,), index % 7), index % 10


data, model, sampler = Store(), nn.Linear(64, 10), None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model, sampler = DistributedDataParallel(model), DistributedSampler(data)
train(DataLoader(data, batch_size=10, sampler=sampler, num_workers=2), model=model)
if dist.is_initialized():
    dist.destroy_process_group()
