"""The hook of a naive DDP averages the parameter instead of its gradient

picotron's naive wrapper does this. Each backward pass hides the drift, and the next step brings it back.

`register_post_accumulate_grad_hook` calls the hook with the parameter, whatever the hook calls its argument.

- huggingface/picotron#39, pytorch/pytorch#187268
"""

from typing import Any

import torch
import torch.distributed as dist

from ddp.museum.exhibit import BROKEN, batches, finish, spread, start, train


def average(grad: Any) -> None:
    """Average over ranks, as soon as a parameter's gradient is complete."""
    if not BROKEN:
        grad = grad.grad
    dist.all_reduce(grad)  # audit: averages-parameters
    grad /= dist.get_world_size()


start()
model = torch.nn.Linear(8, 2)  # the seed gives all ranks the same weights
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, optimizer, batches())
finish("largest difference of a weight between ranks", spread(model))
