"""The gradient's norm is summed over ranks although each rank has the whole gradient: clipping clips too much

On two ranks, a norm of 0.8 was reported as 1.131 and the gradient clipped to 0.707, although the limit was 1.

After DDP's backward pass, each rank has the complete gradient. A sum of squares over W ranks makes the norm too large
by the square root of W. Only shards need that sum: see norm_of_a_shard.py.

- modelscope/twinkle#290 (open)
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, gradient_norm, start

start()
model, optimizer = ddp_and_sgd()
for inputs, _ in batches():
    optimizer.zero_grad()
    F.mse_loss(model(inputs), 100 * inputs[:, :2]).backward()
    square = gradient_norm(model.parameters()) ** 2
    if BROKEN:
        dist.all_reduce(square)  # audit: norm-summed-twice
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, square.sqrt())
    optimizer.step()
finish("norm of the last gradient, clipped at 1", gradient_norm(model.parameters()).item())
