"""Six steps on two hosts with a checkpoint after each. In the third, rank 1 is killed, once."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp.by_hand import HandwrittenDistributedDataParallel  # torch's sends from C++, where no recorder sees it

dist.init_process_group("gloo")
checkpoint = Path(f"{os.environ['RECORDED_FILES']}.pt")
torch.manual_seed(0)
model = HandwrittenDistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    step = saved["step"]
    model.load_state_dict(saved["model"])
while step < 6:
    inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = F.mse_loss(model(inputs), inputs)
    if step == 2 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    time.sleep(0.3)  # a larger model
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if dist.get_rank() == 0:
        torch.save({"step": step, "model": model.state_dict()}, f"{checkpoint}.tmp")
        os.replace(f"{checkpoint}.tmp", checkpoint)
    dist.barrier()  # no rank is ahead of the checkpoint
dist.destroy_process_group()
