"""Scripts that the tests audit, by name; each is written to a file of its own."""

from __future__ import annotations

GROUP = """
import importlib.util, os, sys, time
importlib.util.find_spec("torch")  # as libraries do that can do without
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the group, and no model after it: ddp/resilience/README.md, "A clean exit"
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

def train(steps=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)))
    model.training = False  # of the wrapper alone, as Lightning leaves it
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

# Right code, though it looks like a bug: two losses in a step, a closure, two passes, steps that are skipped, divided losses.
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

torch.manual_seed(0)
network = torch.nn.Linear(8, 2)  # sums of micro-batches are kept outside of .grad, as by Megatron
optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(4):
    sums = [torch.zeros_like(parameter) for parameter in network.parameters()]
    for _ in range(2):
        (loss(network) / 2).backward()
        for total, parameter in zip(sums, network.parameters()):
            total += parameter.grad
            parameter.grad = None
    for total, parameter in zip(sums, network.parameters()):
        dist.all_reduce(total)
        parameter.grad = total / dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
del model
dist.destroy_process_group()
"""
)

JOINS = (
    GROUP
    + """
dist.device_mesh.init_device_mesh("cpu", (2,))  # it makes the group by a name of its own
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
HANGS = GROUP + 'dist.init_process_group("gloo")\ntrain()\nif dist.get_rank() == 0:\n    dist.barrier()\ntrain()\n'
OTHER_ORDER = (
    GROUP
    + """
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(1))
for size in (1, 1000) if dist.get_rank() == 0 else (1000, 1):
    dist.all_reduce(torch.zeros(size))
train()
"""
)
WITHOUT_GROUP = "import torch\n"
STARTS_ALONE = """
import subprocess, sys
subprocess.run([sys.executable, "-I", "-c", "import torch"], check=True)
"""
WITHOUT_STEP = GROUP + 'dist.init_process_group("gloo")\ntrain(0)\ndist.destroy_process_group()\n'

LOADERS = (
    GROUP
    + """
import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
rank, ranks = dist.get_rank(), dist.get_world_size()

class Noisy(Dataset):
    def __init__(self):
        self.inputs, self.labels = torch.randn(64, 8), torch.randint(2, (64,))

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return self.inputs[i] + torch.rand(8) + torch.from_numpy(np.random.rand(8)).float(), int(self.labels[i])

def run(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer

def batches(count=6):
    return [(torch.randn(16, 8), torch.randint(2, (16,))) for _ in range(count)]

network, noisy = torch.nn.Linear(8, 2), Noisy()
torch.manual_seed(1 + rank)
"""
)

# Right and common code: coefficients of losses, losses summed over coordinates and over heads, micro-batches counted across
# epochs, an evaluation within an epoch, padding that is cut after it was gathered, ranks with data sets of their own,
# two loaders in each step, and local SGD.
COMMON = (
    LOADERS
    + """
class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)])
        self.box = torch.nn.Linear(8, 2)

    def forward(self, inputs):
        return [head(inputs) for head in self.heads], self.box(inputs)

class Stream(TensorDataset):
    def __len__(self):
        raise TypeError("it has no length")

def evaluate():
    model.eval()
    tested = DistributedSampler(test, shuffle=False)
    with torch.no_grad():
        found = torch.cat([model(inputs)[0][0].argmax(1) for inputs, *_ in DataLoader(test, 4, sampler=tested)])
    parts = [torch.empty_like(found) for _ in range(ranks)]
    dist.all_gather(parts, found)
    correct = torch.zeros(())
    with torch.no_grad():
        for inputs, labels, _ in DataLoader(torch.utils.data.Subset(test, range(rank, 27, ranks)), 4):
            correct += (model(inputs)[0][0].argmax(1) == labels).sum()
    dist.all_reduce(correct)
    model.train()
    return torch.stack(parts, 1).flatten()[: len(test)]

torch.manual_seed(0)
data, test = (TensorDataset(torch.randn(n, 8), torch.randint(4, (n,)), torch.rand(n, 2)) for n in (72, 27))
model = DistributedDataParallel(Heads())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + rank)
sampler = DistributedSampler(data)
count = 0
for epoch in range(3):
    sampler.set_epoch(epoch)
    for inputs, labels, boxes in DataLoader(data, 6, sampler=sampler):
        if count % 8 == 0:
            evaluate()
        heads, box = model(inputs)
        loss = 2 * F.smooth_l1_loss(box, boxes) + F.mse_loss(box, boxes, reduction="none").sum(1).mean()
        for logits in heads:
            loss = loss + F.cross_entropy(logits, labels)
        (loss / 4).backward()
        count += 1
        if count % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for inputs, labels, boxes in DataLoader(Stream(*data.tensors), 9, sampler=range(rank, 72, ranks)):
    heads, box = model(inputs)  # one backward pass for the sum of a head's losses, with a coefficient
    (F.cross_entropy(sum(heads), labels) + 2 * F.mse_loss(box, boxes)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), torch.ones(1))
    optimizer.step()
    optimizer.zero_grad()
    plateau.step(torch.zeros(1))

both = TensorDataset(*data[:36]), TensorDataset(*data[36:])
orders = [DistributedSampler(each) for each in both]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for order in orders:
        order.set_epoch(epoch)
    loaders = [DataLoader(each, 6, sampler=order) for each, order in zip(both, orders)]
    for batches_of_both in zip(*loaders):
        inputs, labels, boxes = map(torch.cat, zip(*batches_of_both))
        heads, box = model(inputs)
        (F.cross_entropy(sum(heads), labels) + F.mse_loss(box, boxes)).backward()
        optimizer.step()
        optimizer.zero_grad()

optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
for parameter in network.parameters():
    dist.broadcast(parameter.data, 0)
for step, (inputs, labels) in enumerate(batches(8)):
    F.cross_entropy(network(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 3:
        for parameter in network.parameters():
            dist.all_reduce(parameter.data, op=dist.ReduceOp.SUM)
            parameter.data /= ranks
del model
dist.destroy_process_group()
"""
)

# Wrong code, and the audit's words for it.
HINTS = ("ONE_PART", "LEAVES_OUT", "TRAINED_ON")
WRONG = {
    "SHUFFLED": (
        "samples arrive on every rank",
        """
run(DistributedDataParallel(network), DataLoader(noisy, 8, shuffle=True))
""",
    ),
    "SEEDED": (
        "loader workers draw the same numbers: they are seeded alike",
        """
def seed(_):
    np.random.seed(42)

for epoch in range(2):
    sampler = DistributedSampler(noisy)
    sampler.set_epoch(epoch)
    run(DistributedDataParallel(network), DataLoader(noisy, 8, sampler=sampler, num_workers=1, worker_init_fn=seed))
""",
    ),
    "OWN_PART": (
        "too small by a factor of 2",
        """
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, _ in batches():
    own = F.normalize(model(inputs), dim=-1)
    parts = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(parts, own)
    parts[rank] = own
    every = torch.cat(parts)
    logits, labels = every @ (every + 0.1).T, torch.arange(len(every))
    ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "NEVER_ON": (
        "no forward pass of this step has require_backward_grad_sync on",
        """
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for micro_step, (inputs, labels) in enumerate(batches(2)):
        model.require_backward_grad_sync = micro_step == 2
        (F.cross_entropy(model(inputs), labels) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "UNFROZEN": (
        "or were frozen",
        """
network.bias.requires_grad_(False)
model = DistributedDataParallel(network)
network.bias.requires_grad_(True)
run(model, batches())
""",
    ),
    "BY_HAND": (
        "the inputs of all 6 forward calls are equal",
        """
torch.manual_seed(7)
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, _ in batches():
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    ),
    "ONE_PLACE": (
        "ranks [0, 1] write",
        """
from pathlib import Path

run(DistributedDataParallel(network), batches())
partial = Path(__file__).with_name(f"partial{rank}")
torch.save(torch.get_rng_state(), partial)
partial.replace(Path(__file__).with_name("random.pt"))
""",
    ),
    "ONE_PART": (
        "and nothing is summed over the ranks afterwards",
        """
model = DistributedDataParallel(network)
run(model, DataLoader(noisy, 8, sampler=DistributedSampler(noisy)))
model.eval()
with torch.no_grad():
    for inputs, _ in DataLoader(noisy, 8, sampler=DistributedSampler(noisy, shuffle=False)):
        model(inputs)
""",
    ),
    "ONE_S_OWN": (
        "decides on each rank by the rank's own value",
        """
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
for inputs, labels in batches():
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step(loss.detach())
""",
    ),
    "SHORT": (
        "a step of 1 micro-batch is divided by 2",
        """
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (inputs, labels) in enumerate(batches(5)):
    (F.cross_entropy(model(inputs), labels) / 2).backward()
    if number in (1, 3, 4):
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "ENDS_EARLY": (
        "the learning rate is 0 in the last 4 of 8 optimizer steps",
        """
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
for inputs, labels in batches(8):
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
""",
    ),
    "IGNORED": (
        "the loss is not divided by the 2 micro-batches of a step",
        """
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (inputs, labels) in enumerate(batches(8)):
    labels = labels.repeat(8)
    labels[:rank] = -100
    F.cross_entropy(model(inputs.repeat(8, 1)), labels).backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
""",
    ),
    "OF_ONE": (
        "the ranks use different learning rates",
        """
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=4)
for inputs, labels in batches(8):
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        schedule.step()
""",
    ),
    "LEAVES_OUT": (
        "4 of 28 samples are left out of the evaluation",
        """
run(DistributedDataParallel(network), DataLoader(noisy, 8, sampler=DistributedSampler(noisy)))
test = TensorDataset(torch.randn(28, 8))
count = sum(len(inputs) for inputs, in DataLoader(test, 4, sampler=DistributedSampler(test), drop_last=True))
dist.all_reduce(torch.tensor(count))
""",
    ),
    "TRAINED_ON": (
        "8 of 8 samples of this evaluation are trained on",
        """
data = TensorDataset(noisy.inputs, noisy.labels)
run(DistributedDataParallel(network), DataLoader(data, 8, sampler=DistributedSampler(data)))
part = torch.utils.data.Subset(data, range(rank, 16, 2))
dist.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in DataLoader(part, 4))))
""",
    ),
    "SPLITS": (
        "samples that rank 0 evaluates are trained on by other ranks, and none by itself",
        """
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.zeros(64).long())
torch.manual_seed(1 + rank)
train, test = torch.utils.data.random_split(data, [48, 16])
run(DistributedDataParallel(network), DataLoader(train, 8, sampler=DistributedSampler(train)))
dist.all_reduce(torch.tensor(sum(len(inputs) for inputs, _ in DataLoader(test, 4))))
""",
    ),
    "SWAPPED": (
        "each evaluation leaves other weights",
        """
model, sampler = DistributedDataParallel(network), DistributedSampler(noisy)
test = TensorDataset(torch.randn(28, 8))
for epoch in range(2):
    sampler.set_epoch(epoch)
    run(model, DataLoader(noisy, 8, sampler=sampler))
    count = sum(len(inputs) for inputs, in DataLoader(test, 4, sampler=range(rank, 28, ranks)))
    dist.all_reduce(torch.tensor(count))
    network.weight.data.mul_(0.5)
""",
    ),
    "NUMPY": (
        "NumPy or Python draws the same numbers on all ranks",
        """
np.random.seed(0)
run(DistributedDataParallel(network), DataLoader(noisy, 8, sampler=DistributedSampler(noisy)))
""",
    ),
}

# Right scripts of which a part cannot be judged.
TRAINS = """
dist.init_process_group("gloo")
torch.manual_seed(0)
model = {model}
optimizer = torch.optim.{optimizer}(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range({steps}):
    def closure():
        optimizer.zero_grad()
        loss = {loss}
        loss.backward()
        return loss
    optimizer.step(closure) if {closes} else (closure(), optimizer.step())
dist.destroy_process_group()
"""
WRAPPED, LOSS = (
    "DistributedDataParallel(torch.nn.Linear(8, 2))",
    "F.mse_loss(model(torch.randn(16, 8)), torch.ones(16, 2))",
)
CLOSURES = GROUP + TRAINS.format(model=WRAPPED, optimizer="LBFGS", steps=2, loss=LOSS, closes=True)
OWN_LOSS = GROUP + TRAINS.format(
    model=WRAPPED, optimizer="SGD", steps=3, loss="model(torch.randn(16, 8)).square().mean()", closes=False
)
SHARDED = (
    GROUP
    + "from torch.distributed.fsdp import fully_shard\nfrom torch.distributed.device_mesh import init_device_mesh\n"
    + TRAINS.format(
        model='fully_shard(torch.nn.Linear(8, 2), mesh=init_device_mesh("cpu", (2,)))',
        optimizer="SGD",
        steps=3,
        loss=LOSS,
        closes=False,
    )
)

# It saves, copies and compiles what is watched; and it looks for watchers of what no torch has.
OBJECTS = (
    GROUP
    + """
import copy, io, warnings
warnings.filterwarnings("error", "backward hook")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return F.mse_loss(self.layer(x + torch.rand(8)), x)

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2:
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss = model(torch.randn(8, 8))
    loss.backward()
    optimizer.step()
assert not copy.deepcopy(model.module)._forward_pre_hooks
for saved in (model, model.module, loss):
    file = io.BytesIO()
    torch.save(saved, file)
    assert b"foreign_script" not in file.getvalue() and b"_audit" not in file.getvalue()
torch.jit.script(model.module.eval())(torch.randn(8, 8))
with torch.no_grad():
    torch.jit.trace(model.module, torch.randn(8, 8), check_trace=False)
watch = sys.modules["_foreign_script_watch"]
watch.events.watch(torch.optim, "renamed")(None)
watch.PARTS = ("gone",)
watch.install()
dist.destroy_process_group()
"""
)

LABELED = (
    GROUP
    + """
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

class Rows(Dataset):
    def __init__(self, n=64):
        self.inputs = torch.randn(n, 8)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"label": int(self.inputs[index, 0] > 0), "inputs": self.inputs[index]}

class Reentrant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, inputs):
        return self.head(checkpoint(self.block, self.stem(inputs), use_reentrant=True))

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own):
        both = own.new_empty(ranks * len(own), *own.shape[1:])
        dist.all_gather(list(both.split(len(own))), own)
        return both

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.contiguous())
        return gradient.chunk(ranks)[rank]

def loss_of(logits, target):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))

def batches():
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        yield from DataLoader(data, 8, sampler=sampler)

def number(value):
    parts = [torch.empty(()) for _ in range(ranks)]
    dist.all_gather(parts, value)
    return sum(parts)

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = Rows()
torch.manual_seed(1 + rank)
"""
)
PARTS = """
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
parts = [list(part.parameters()) for part in model.module]
optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
"""
# Right ones, in which things are told apart by what they are.
IDENTITIES = {
    "folds, of which rank 0 looks at a batch": """
torch.manual_seed(0)
model = DistributedDataParallel(Reentrant())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for fold in range(3):
    sampler = DistributedSampler(part := Subset(data, [at for at in range(64) if at % 3 != fold]))
    loader = DataLoader(part, 7, sampler=sampler)
    if rank == 0:
        next(iter(loader))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["inputs"]), batch["label"])
            loss.backward()
            assert number(loss) > 0
            squares = torch.stack([p.grad.norm() for p in model.parameters()]).norm() ** 2
            dist.all_reduce(squares)  # for a log
            optimizer.step()
""",
    "two optimizers of two networks, and one helper for their losses": """
torch.manual_seed(0)
makes = DistributedDataParallel(torch.nn.Linear(4, 8))
judges = DistributedDataParallel(torch.nn.Linear(8, 1))
one, other = (torch.optim.Adam(net.parameters(), lr=0.01) for net in (makes, judges))
torch.manual_seed(1 + rank)
for batch in batches():
    other.zero_grad()
    loss_of(judges(batch["inputs"]), 1.0).backward()
    made = makes(torch.randn(8, 4))
    loss_of(judges(made.detach()), 0.0).backward()
    other.step()
    one.zero_grad()
    loss_of(judges(made), 1.0).backward()
    one.step()
""",
    "two optimizers of one network": PARTS
    + """
for batch in batches():
    model.zero_grad()
    F.cross_entropy(model(batch["inputs"]), batch["label"]).backward()
    for part, optimizer in zip(parts, optimizers):
        torch.nn.utils.clip_grad_norm_(part, 0.1)
        optimizer.step()
""",
    "two optimizers of one network, with a scaler, and both clipped before both steps": PARTS
    + """
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for batch in batches():
    model.zero_grad()
    scaler.scale(F.cross_entropy(model(batch["inputs"]), batch["label"])).backward()
    for part, optimizer in zip(parts, optimizers):
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(part, 0.1)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
""",
    "an attack in each step, and a pass of a teacher": """
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for batch in batches():
    model.eval()
    inputs = batch["inputs"].clone().requires_grad_()
    F.cross_entropy(model(inputs), batch["label"]).backward()
    model.train()
    with torch.no_grad():
        soft = model.module(batch["inputs"]).softmax(1)
    optimizer.zero_grad()
    logits = model(inputs.detach() + 0.1 * inputs.grad.sign())
    (F.cross_entropy(logits, batch["label"]) + 0.1 * F.mse_loss(logits.softmax(1), soft)).backward()
    optimizer.step()
""",
    "tables that are divided, a gather with a backward pass of its own, and draws with replacement": """
table = torch.nn.Linear(4, 8)  # another one on each rank
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1)
for epoch in range(2):
    order = torch.randint(64, (32,), generator=torch.Generator().manual_seed(epoch)).tolist()
    for batch in DataLoader(data, 4, sampler=order[rank::ranks]):
        optimizer.zero_grad()
        all_of_them = Gather.apply(model(batch["inputs"]))
        F.mse_loss(all_of_them, torch.ones_like(all_of_them)).backward()
        F.mse_loss(table(batch["inputs"][:, :4]), batch["inputs"]).backward()
        optimizer.step()
""",
    "a sampler that divides the order of another, and an epoch in a file beside the checkpoint": """
class OfOrder(DistributedSampler):
    def __iter__(self):
        return iter(list(self.dataset)[rank::ranks])

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
order = torch.utils.data.RandomSampler(data, num_samples=16, generator=torch.Generator().manual_seed(0))
loader = DataLoader(data, 4, sampler=OfOrder(order))
for epoch in range(2):
    for batch in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(batch["inputs"]), batch["label"]).backward()
        optimizer.step()
    if rank == 0:
        folder = os.path.dirname(__file__)
        torch.save({"last_epoch": epoch}, f"{folder}/last.pt")
        torch.save({"net": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/net.pt")
""",
    "data that are drawn again, as they were": """
for phase in range(2):
    torch.manual_seed(0)
    data = Rows()
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(batch["inputs"]), batch["label"]).backward()
        optimizer.step()
""",
    "a label in 64 that is ignored": """
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in batches():
    labels = batch["label"].repeat(8)
    labels[:rank] = -100
    optimizer.zero_grad()
    F.cross_entropy(model(batch["inputs"].repeat(8, 1)), labels).backward()
    optimizer.step()
""",
    "a probe that rank 0 trains alone, now and then": """
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if rank == 0:
    probe = torch.nn.Linear(2, 2)
    of_probe = torch.optim.SGD(probe.parameters(), lr=0.1)
for step, batch in enumerate(batches()):
    optimizer.zero_grad()
    logits = model(batch["inputs"])
    F.cross_entropy(logits, batch["label"]).backward()
    optimizer.step()
    if rank == 0 and step % 2:
        of_probe.zero_grad()
        F.cross_entropy(probe(logits.detach()), batch["label"]).backward()
        of_probe.step()
""",
}
NEVER_CLEARED = """
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
one, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model.module)
sampler = DistributedSampler(data)
for batch in DataLoader(data, 8, sampler=sampler):
    F.cross_entropy(model(batch["inputs"]), batch["label"]).backward()
    one.step()
    other.step()
    one.zero_grad()
"""
