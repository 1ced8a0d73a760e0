"""Gradients are clipped before they are unscaled: clipping sees them 65,536 times too large

An official example of torch trains like this.

GradScaler multiplies the loss by 65,536. The norm is far above any limit, each gradient is clipped, and unscaling then
makes it 65,536 times too small. `unscale_` must come first.

- pytorch/examples#1196 (open)
"""

import torch
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, gradient_norm, start

start()
model, optimizer = ddp_and_sgd()
scaler = torch.amp.GradScaler("cpu")
for inputs, labels in batches():
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not BROKEN:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # audit: scaled-clipping
    scaler.step(optimizer)
    scaler.update()
finish("norm of the last gradient, clipped at 0.1", gradient_norm(model.parameters()).item())
