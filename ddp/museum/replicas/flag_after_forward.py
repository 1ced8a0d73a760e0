"""The flag that switches averaging on is set after the forward pass: only one of four micro-batches is averaged

A GPT-2 reproduction accumulated gradients like this. The loss at step 250 was 6.43 instead of 6.16.

DDP's `forward` reads `require_backward_grad_sync`; the backward pass does not read it again. Each micro-step therefore
uses the flag of the one before, and only the first of a step is averaged.

- karpathy/build-nanogpt#30
"""

import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, spread, start

start()
model, optimizer = ddp_and_sgd()
for number, (inputs, labels) in enumerate(batches(40)):
    is_last = number % 4 == 3  # of the step's micro-batches
    if not BROKEN:
        model.require_backward_grad_sync = is_last
    loss = F.cross_entropy(model(inputs), labels) / 4
    if BROKEN:
        model.require_backward_grad_sync = is_last  # audit: flag-after-forward
    loss.backward()
    if is_last:
        optimizer.step()
        optimizer.zero_grad()
finish("largest difference of a weight between ranks", spread(model))
