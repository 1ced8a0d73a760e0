"""Gradients are accumulated by hand, but each micro-step clears what was there: all micro-batches but one are lost

DeepSpeed's ZeRO-2 did that when its configuration said one micro-step and the training loop made several. Re-enacted.

Each backward pass is then the boundary of a step, and a boundary resets the accumulated gradient.

- allenai/open-instruct#1498
- deepspeedai/DeepSpeed#7985 (a relative: the last micro-batch misses the reduction)
"""

import copy
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, ddp_and_sgd, finish, gradient_error, start

rank, ranks = start()
model, optimizer = ddp_and_sgd()
for inputs in torch.randn(640, 8).split(64):  # the data set is the same on all ranks
    alone = copy.deepcopy(model.module)  # one process with the global batch
    F.mse_loss(alone(inputs), inputs[:, :2]).backward()
    if not BROKEN:
        optimizer.zero_grad()
    for micro_step, share in enumerate(inputs[rank::ranks].chunk(4)):
        if BROKEN:
            optimizer.zero_grad()  # audit: last-micro-batch-only
        with nullcontext() if micro_step == 3 else model.no_sync():
            (F.mse_loss(model(share), share[:, :2]) / 4).backward()
    error = gradient_error(model, alone)
    optimizer.step()
finish("relative error of the last gradient, compared with one process", error)
