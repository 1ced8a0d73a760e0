"""Checkpoints in a training loop of one's own. Killed and started again, it ends with the same bits.

torchrun --nproc_per_node=2 own_loop_checkpoints.py 100 my-checkpoints
"""

import sys
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional  # DDP imports it, and it would keep a group that is there by then
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp.checkpoint import prune, resume, save

steps, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
parts: dict[str, Any] = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler}
first_step = resume(folder, parts)  # 0 at the first start; a damaged checkpoint is passed over
ddp_model = DistributedDataParallel(model)
for step in range(first_step, steps):
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))  # stateless
    torch.nn.functional.cross_entropy(ddp_model(inputs), (inputs.sum(1) > 0).long()).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    ema.update_parameters(model)
    if dist.get_rank() == 0 and (step + 1) % 10 == 0:
        save(folder, step + 1, {name: part.state_dict() for name, part in parts.items()})
        prune(folder, keep_last=2)
print(f"rank {dist.get_rank()}: sum of the weights {sum(p.double().sum().item() for p in ema.parameters())!r}")
del ddp_model  # with it go the group's threads: one that is still busy while Python shuts down aborts the process
dist.destroy_process_group()
