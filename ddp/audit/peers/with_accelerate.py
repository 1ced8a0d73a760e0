"""The job of the table with Accelerate, as its documentation has each part.

torchrun --nproc_per_node=2 with_accelerate.py FOLDER --batch-size 12 --micro-steps 2
"""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--batch-size", type=int, default=12)  # of a rank and micro-step
parser.add_argument("--micro-steps", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
args = parser.parse_args()

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=args.micro_steps)
set_seed(0)
inputs = torch.randn(176, 8)
labels = (inputs.sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs[:144], labels[:144]), args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(inputs[144:], labels[144:]), args.batch_size)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(model, optimizer, loader, test_loader, scheduler)
finished = sorted(name for name in os.listdir(args.folder) if name.startswith("epoch_"))
if finished:
    accelerator.load_state(os.path.join(args.folder, finished[-1]))
for epoch in range(len(finished), 3):
    model.train()
    for batch, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(batch), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    model.eval()
    right = count = 0
    for batch, targets in test_loader:
        with torch.no_grad():
            predictions = model(batch).argmax(1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        right, count = right + int((predictions == targets).sum()), count + len(targets)
    accelerator.print(f"epoch {epoch}: {right} of {count} right")
    accelerator.save_state(os.path.join(args.folder, f"epoch_{epoch}"))
accelerator.end_training()
