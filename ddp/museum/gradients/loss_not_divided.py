"""Gradients are accumulated, but the loss is not divided by the number of micro-steps

A recipe of NeMo Automodel had gradients 8 times too large: the number of ranks times that of micro-steps. Here is the
second factor.

Each micro-batch's loss is a mean. `backward` adds their gradients, and the sum of four means is four times the mean.

- NVIDIA-NeMo/Automodel#3830
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
    optimizer.zero_grad()
    for micro_step, share in enumerate(inputs[rank::ranks].chunk(4)):
        with nullcontext() if micro_step == 3 else model.no_sync():
            loss = F.mse_loss(model(share), share[:, :2])  # audit: loss-not-divided
            (loss if BROKEN else loss / 4).backward()
    error = gradient_error(model, alone)
    optimizer.step()
finish("relative error of the last gradient, compared with one process", error)
