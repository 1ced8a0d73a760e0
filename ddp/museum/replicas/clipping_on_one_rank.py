"""Only one rank clips its gradient, and replicas of the same weights drift apart

BLOOM was trained on 384 A100s. Its layer norms, which all tensor-parallel ranks hold, drifted apart; that was noticed
after 15 days. Re-enacted here with data-parallel replicas.

Clipping rescales a gradient, so equal weights stay equal only if all ranks clip.

- bigscience-workshop/bigscience: train/tr11-176B-ml/chronicles.md, 2022-03-24
- deepspeedai/DeepSpeed#1801
"""

import torch
import torch.nn.functional as F

from ddp.museum.exhibit import BROKEN, batches, ddp_and_sgd, finish, spread, start

rank, ranks = start()
model, optimizer = ddp_and_sgd()
for inputs, labels in batches():
    F.cross_entropy(model(inputs), labels).backward()
    clips = rank == 0 if BROKEN else True
    if clips:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # audit: clipping-on-one-rank
    optimizer.step()
    optimizer.zero_grad()
finish("largest difference of a weight between ranks", spread(model))
