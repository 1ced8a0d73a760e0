"""The forward pass goes around the wrapper: nothing is averaged, and each rank trains a model of its own

Two published code bases trained like this: reinforcement learning that called `model.module(...)` for one loss, and the action
head of a robot's model. The loss went down, and rank 0's weights, learned from its own samples alone, were saved.

DDP finds the end of a backward pass by the forward pass that its own `forward` saw. It sees no call of `model.module`.

- jingyaogong/minimind#853, fixed in #854
- moojink/openvla-oft#160
"""

import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, spread, start

start()
model, optimizer = ddp_and_sgd()
for inputs, labels in batches():
    outputs = model.module(inputs) if BROKEN else model(inputs)  # audit: around-the-wrapper
    F.cross_entropy(outputs, labels).backward()
    optimizer.step()
    optimizer.zero_grad()
finish("largest difference of a weight between ranks", spread(model))
