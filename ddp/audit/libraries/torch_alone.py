"""The job of the table with torch alone, as its tutorials have each part.

torchrun --nproc_per_node=2 torch_alone.py FOLDER --batch-size 12 --micro-steps 2
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--batch-size", type=int, default=12)  # of a rank and micro-step
parser.add_argument("--micro-steps", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()
checkpoint = os.path.join(args.folder, "checkpoint.pt")
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(176, 8)
train = TensorDataset(inputs[:144], (inputs[:144].sum(1) > 0).long())
test = TensorDataset(inputs[144:], (inputs[144:].sum(1) > 0).long())
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(train, ranks, rank, seed=0)
loader = DataLoader(train, args.batch_size, sampler=sampler)
test_loader = DataLoader(test, args.batch_size, sampler=range(rank, len(test), ranks))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(32, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
scaler = torch.amp.GradScaler("cpu")
first_epoch = 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    scaler.load_state_dict(state["scaler"])
    first_epoch = state["epochs"]
for epoch in range(first_epoch, 3):
    sampler.set_epoch(epoch)
    torch.manual_seed(1000 * epoch + rank)  # each rank drops other units
    model.train()
    for step, (images, labels) in enumerate(loader):
        last = (step + 1) % args.micro_steps == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(images), labels) / args.micro_steps
            scaler.scale(loss).backward()
        if last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    scheduler.step()
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in test_loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum().item(), len(labels)])
    dist.all_reduce(counts)
    if rank == 0:
        print(f"epoch {epoch}: {counts[0]:.0f} of {counts[1]:.0f} right")
        parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "model": model.module}
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epochs": epoch + 1}, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
    dist.barrier()
dist.destroy_process_group()
