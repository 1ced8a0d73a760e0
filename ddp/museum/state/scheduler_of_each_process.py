"""The learning rate falls W times too fast, because the scheduler is stepped once for each process

With W GPUs, the schedule was over after 1/W of the steps. Several training scripts of several projects had this bug.

Accelerate steps the scheduler W times per step, which is right for a schedule that counts the steps of one process.
The schedules of these scripts count the optimizer's steps already.

- huggingface/accelerate#2926, #1398
- huggingface/diffusers#3954
- Lightricks/LTX-Video-Trainer#67
"""

import torch
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, start

rank, ranks = start()
model, optimizer = ddp_and_sgd()
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20)  # zero after the last step
idle = 0
for inputs, labels in batches(20):
    F.cross_entropy(model(inputs), labels).backward()
    idle += scheduler.get_last_lr() == [0]
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(ranks if BROKEN else 1):
        scheduler.step()  # audit: scheduler-of-each-process
finish("steps with a learning rate of zero, of 20", idle)
