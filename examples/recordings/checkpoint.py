"""Two steps, each followed by a checkpoint. With ``--kill`` the process is killed in the second, before the rename."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from ddp.checkpoint import newest, save

folder = Path(os.environ["RECORDED_FILES"])
torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    inputs = torch.randn(64, 512)
    F.mse_loss(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 and "--kill" in sys.argv:
        os.rename = os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(folder, step + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
assert newest(folder) is not None
