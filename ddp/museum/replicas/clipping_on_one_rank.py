"""Only one rank clips its gradient, and replicas of the same weights drift apart

BLOOM was trained on 384 A100s. Its layer norms, which all tensor-parallel ranks hold, drifted apart; that was noticed
after 15 days. Re-enacted here with data-parallel replicas.

Clipping rescales a gradient, so equal weights stay equal only if all ranks clip.

- bigscience-workshop/bigscience: train/tr11-176B-ml/chronicles.md, 2022-03-24
- deepspeedai/DeepSpeed#1801
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp.museum.exhibit import BROKEN, show, spread

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # each rank has samples of its own, and DDP sends the weights of rank 0
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    inputs = torch.randn(16, 8)
    labels = (inputs.sum(1) > 0).long()
    F.cross_entropy(model(inputs), labels).backward()
    if dist.get_rank() == 0 or not BROKEN:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
show("largest difference of a weight between ranks", spread(model))
dist.destroy_process_group()
