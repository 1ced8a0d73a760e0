"""The job of the table with Accelerate, as its documentation has each part.

torchrun --nproc_per_node=2 with_accelerate.py FOLDER --batch-size 12 --micro-steps 2
"""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from ddp.audit.libraries.job import arguments, data_sets, network

args = arguments()
accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=args.micro_steps)
set_seed(0)
train, test = data_sets()
loader, test_loader = DataLoader(train, args.batch_size, shuffle=True), DataLoader(test, args.batch_size)
model = network(args.dropout)
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
