"""Scripts that the tests audit, by name; each is written to a file of its own."""

from __future__ import annotations

GROUP = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group, and no model after it: ddp/resilience/README.md, "A clean exit"
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

def train(steps=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        F.cross_entropy(model(torch.randn(16, 8)), torch.randint(2, (16,))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
"""

RIGHT = (
    GROUP
    + """
import ddp  # a module of the script's own, beside it
assert ddp.OWN
dist.init_process_group("gloo")
weights = torch.nn.utils.parameters_to_vector(train().parameters()).detach()
if dist.get_rank() == 0:
    torch.save([weights, torch.get_rng_state()], sys.argv[1])
dist.destroy_process_group()
"""
)

SPAWNS = (
    GROUP
    + """
import torch.multiprocessing as mp

def work(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    train()
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model.module(torch.randn(16, 8)), torch.randint(2, (16,))).backward()  # around
    optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), nprocs=2)
"""
)

# What is right, though it looks like a bug: two losses in a step, a closure, two passes, steps that are skipped, divided losses.
UNUSUAL = (
    GROUP
    + """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

dist.init_process_group("gloo")

def build(kind, **settings):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    torch.manual_seed(1 + dist.get_rank())
    return model, kind(model.parameters(), lr=0.01, **settings)

def loss(model):
    return F.cross_entropy(model(torch.randn(16, 8)), torch.randint(2, (16,)))

model, optimizer = build(torch.optim.SGD)  # a discriminator's step
for _ in range(4):
    F.mse_loss(model(torch.randn(16, 8)), torch.ones(16, 2)).backward()
    F.mse_loss(model(torch.randn(16, 8)), torch.zeros(16, 2)).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()

model, optimizer = build(torch.optim.LBFGS, max_iter=3)
samples, labels = torch.randn(16, 8), torch.randint(2, (16,))
def closure():
    optimizer.zero_grad()
    value = F.cross_entropy(model(samples), labels)
    value.backward()
    return value
for _ in range(2):
    optimizer.step(closure)

model, optimizer = build(torch.optim.SGD)  # sharpness-aware minimization
for _ in range(4):
    loss(model).backward()
    moves = [parameter.grad.mul(0.05) for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    loss(model).backward()
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    optimizer.step()
    optimizer.zero_grad()

model, optimizer = build(torch.optim.SGD)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)  # the first steps overflow
schedule = SequentialLR(optimizer, [LinearLR(optimizer), ConstantLR(optimizer)], milestones=[3])
for _ in range(24):
    with torch.autocast("cpu", torch.float16):
        value = loss(model)
    scaler.scale(value).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    schedule.step()

model, optimizer = build(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD)
for _ in range(4):
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()

torch.manual_seed(0)
network = torch.nn.Linear(8, 2)  # averaged by hand: the loss is divided, and the gradients are summed
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(4):
    (loss(network) / dist.get_world_size()).backward()
    for parameter in network.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
del model
dist.destroy_process_group()
"""
)

JOINS = (
    GROUP
    + """
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(2):
    with model.join():
        for _ in range(3 + dist.get_rank()):
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(2, (16,))).backward()
            optimizer.step()
            optimizer.zero_grad()
del model
dist.destroy_process_group()
"""
)

RAISES = GROUP + 'dist.init_process_group("gloo")\nraise RuntimeError("lost")\n'
HANGS = GROUP + 'dist.init_process_group("gloo")\nif dist.get_rank() == 0:\n    time.sleep(1000)\ntrain()\n'
WITHOUT_GROUP = "import torch\n"
WITHOUT_STEP = GROUP + 'dist.init_process_group("gloo")\ntrain(0)\ndist.destroy_process_group()\n'
