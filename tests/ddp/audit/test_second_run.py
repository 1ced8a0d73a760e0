"""The second run: on one rank with the batches of all ranks, it says what differs, and confirms or clears what was suspected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import UsageError
from ddp.audit.compare import Verdict
from ddp.audit.detectors import find
from ddp.audit.finding import Finding
from ddp.audit.settle import settle
from ddp.audit.vary import Plan, Variation, second, third, vary
from ddp.audit.watch.event_types import Event
from tests.ddp.audit.forked import watch
from tests.ddp.audit.test_vary import NOTHING
from tests.support.launch import run_command

SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(149, 8)
labels = (inputs.sum(1) > 0).long()
train, test = TensorDataset(inputs[:128], labels[:128]), TensorDataset(inputs[128:], labels[128:])
network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.0), torch.nn.Linear(16, 2))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(train)
loader = DataLoader(train, 8, sampler=sampler)
exact = range(rank, len(test), ranks)
evaluation = DataLoader(test, 8, sampler=exact)
torch.manual_seed(1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    counts = torch.zeros(2)
    with torch.no_grad():
        model.eval()
        for xb, yb in evaluation:
            counts += torch.tensor([(model(xb).argmax(1) == yb).sum().item(), len(yb)])
        model.train()
    dist.all_reduce(counts)
dist.destroy_process_group()
"""
NOISY = """
import numpy as np

class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x * float(np.random.rand()), y

np.random.seed(0)
train, test = Noisy("""
BEST = """
    best, count = 21, counts[1].item()
    dist.all_reduce(counts)
    if count < best:
        if rank == 0:
            torch.save(network.state_dict(), __file__ + ".pt")
"""
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        each = len(train) // ranks
        return (train[i] for i in range(each * rank, each * (rank + 1)))

loader = DataLoader(Stream(), 8)
"""
MEANS = (
    "(model(xb).argmax(1) == yb).sum().item(), len(yb)",
    "F.cross_entropy(model(xb), yb).item(), 1.0",
)  # of batches
STEPPED = ("optimizer.step()", "optimizer.step()\n        schedule.step()")
LENGTH = (
    "torch.manual_seed(1)\n",
    "torch.manual_seed(1)\nschedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 2 * 128 // ranks // 8)\n",
)
SHORT = (LENGTH[0], LENGTH[1].replace("128 // ranks // 8", "len(loader) // ranks"))
# As many scripts do: with one rank, there is no group.
ALONE = [
    (
        'dist.init_process_group("gloo")\nrank, ranks = dist.get_rank(), dist.get_world_size()',
        """
import os
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo") if ranks > 1 else None""",
    ),
    ("DistributedDataParallel(network)", "DistributedDataParallel(network) if ranks > 1 else network"),
    ("DistributedSampler(train)", "DistributedSampler(train, ranks, rank)"),
    ("dist.all_reduce(counts)", "dist.all_reduce(counts) if ranks > 1 else None"),
    ("dist.destroy_process_group()", ""),
]
OWN_BATCHES = "loader = DataLoader(train, batch_sampler=list(BatchSampler(sampler, 8, False)))"


def audited(folder: Path, *changes: tuple[str, str]) -> tuple[str, list[str], list[str]]:
    """The text of the second run of a script, the names of what is wrong after it, and of what is still suspected."""
    source = SCRIPT
    for was, becomes in changes:
        assert was in source
        source = source.replace(was, becomes)
    path = folder / "script.py"
    path.write_text(source)
    base = watch(folder, [str(path)])
    found = find(base)
    plan = second([str(path)], 2, None, base)
    variation = vary(plan, base, watch)
    verdicts = {finding.name: settle(finding, [variation], base) for finding in found if finding.is_suspicion}
    wrong = [one.name for one in [*found, variation.finding] if one and one.is_wrong]
    return variation.text, wrong, [name for name, is_right in verdicts.items() if is_right is None]


@pytest.mark.examples
@pytest.mark.parametrize(
    ("changes", "said", "wrong"),
    [
        ([], "; 2 metrics are equal", []),
        (ALONE, "the same samples, and gradients within", []),
        (
            [("yb)\n        optimizer.z", "yb) / ranks\n        optimizer.z")],
            "0.5 times",
            ["loss-divided-by-ranks", "vary-ranks"],
        ),
        (
            [("= DistributedSampler(train)", "= DistributedSampler(train, 1, 0)")],
            "256 samples, 128 of them different",
            ["vary-ranks"],
        ),
        (
            [("sampler=exact", "sampler=DistributedSampler(test)")],
            "other numbers",
            ["evaluation-counts-twice", "vary-ranks"],
        ),
        (
            [("    dist.all_reduce(counts)\n", BEST)],
            "steps [8, 16], and after [] on 1 rank",
            ["saved-by-its-own-value"],
        ),
        ([("loader = DataLoader(train, 8, sampler=sampler)\n", STREAM)], "the batches come in another order", []),
        ([("sampler=exact", "shuffle=False"), MEANS], "; 2 metrics are equal", []),
        ([("train, test = TensorDataset(", NOISY)], "samples are augmented", ["same-augmentation"]),
        ([("lr=0.1", "lr=0.1 * ranks")], "since the learning rate grows with the number of ranks", []),
        ([LENGTH, STEPPED], "by a batch that did not grow", []),
        ([SHORT, STEPPED], "uses other learning rates", ["vary-ranks"]),
        ([("Dropout(0.0)", "Dropout(0.1)"), ("manual_seed(1)", "manual_seed(rank)")], "Dropout differs by design", []),
        ([("cross_entropy(model(xb), yb)", "cross_entropy(model(xb), yb, torch.ones(2))")], "class weights are", []),
        ([("loss = ", "loss = model(xb).mean(0).square().sum() + ")], "no mean over samples that torch computes", []),
    ],
)
def test_what_differs_on_one_rank_is_said(
    tmp_path: Path, changes: list[tuple[str, str]], said: str, wrong: list[str]
) -> None:
    text, found, unsettled = audited(tmp_path, *changes)
    assert said in text
    assert (found, unsettled) == (wrong, [])


@pytest.mark.examples
def test_batches_of_the_scripts_own_cannot_grow(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"line \d+ of script.py has batches of its own"):
        audited(tmp_path, ("loader = DataLoader(train, 8, sampler=sampler)", OWN_BATCHES))


@pytest.mark.examples
def test_a_third_rank_tells_a_coefficient_from_a_division(tmp_path: Path) -> None:
    for factor, is_right in (("0.5", False), ("1 / ranks", True)):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.replace("yb)\n        optimizer.z", f"yb) * {factor}\n        optimizer.z"))
        base = watch(tmp_path, [str(path)])
        (finding,) = find(base)
        variation = vary(third([str(path)], 2, finding), base, watch)
        assert settle(finding, [variation], base) is is_right


LOCAL = ("= DistributedSampler(train)", '= DistributedSampler(train, ranks, int(os.environ["LOCAL_RANK"]))')
PROVEN = (
    ": samples-left-out: 64 of 128 samples are seen by no rank in epoch 0; on 1 rank with the batches of 2: epoch 0 has"
)
CLEARED = ": loss-divided-by-ranks was suspected, and the runs above clear it"


@pytest.mark.examples
@pytest.mark.parametrize(
    ("flags", "change", "where", "name", "said"),
    [
        (("--nodes", "2"), LOCAL, "findings", "samples-left-out", PROVEN),
        ((), ("loss.backward()", "(0.5 * loss).backward()"), "cleared", "loss-divided-by-ranks", CLEARED),
    ],
)
def test_the_command_proves_or_clears(
    tmp_path: Path, flags: tuple[str, ...], change: tuple[str, str], where: str, name: str, said: str
) -> None:
    """On two nodes, each rank has the local rank 0."""
    path, found = tmp_path / "script.py", tmp_path / "found.json"
    path.write_text("import os\n" + SCRIPT.replace(*change))
    done = run_command("ddp.audit", "--device=cpu", *flags, "--json", str(found), "--", str(path), timeout_s=240.0)
    assert done.returncode == (where == "findings"), done.stdout + done.stderr
    assert said in done.stdout
    (finding,) = (one for one in json.loads(found.read_text())[where] if one["name"] == name)
    assert (finding["is_wrong"], bool(finding["proof"]), finding["unsettled"]) == (done.returncode, done.returncode, "")


def test_a_suspicion_is_a_hint_until_a_run_proves_it() -> None:
    finding = Finding("samples-left-out", Event(where="x.py:1"), unsettled="there was no second run")
    assert str(finding).startswith("x.py:1: hint: samples-left-out: samples are seen by no rank in an epoch (step 0).")
    assert "It is not settled: there was no second run." in str(finding)
    finding.proof = "on 1 rank: epoch 0 has 64 samples"
    assert finding.is_wrong
    assert str(finding).startswith("x.py:1: samples-left-out: ")


def _variation(kind: str, verdict: Verdict) -> Variation:
    run = Plan(kind, "on a rank", [], 1, lambda *_: verdict)
    return Variation(run, run.what, verdict.text, verdict=verdict)


def test_a_run_settles_what_it_compares_and_nothing_else() -> None:
    """One that repeats settles no suspicion, and one that proves it wins over one in which it does not show."""
    repeated, equal = (_variation(kind, Verdict("equal", samples=True, numbers=True)) for kind in ("repeat", "ranks"))
    third_run, other = _variation("third", Verdict("", numbers=True)), _variation("ranks", Verdict("", samples=False))
    open_one = _variation("ranks", Verdict("in another order"))
    finding = Finding("samples-left-out", Event(where="x.py:1"))
    for runs, is_right, unsettled in (
        ([repeated], None, ""),
        ([third_run], None, ""),
        ([open_one, repeated], None, "on a rank: in another order"),
        ([open_one, equal], False, ""),
        ([equal, other], True, ""),
    ):
        assert settle(finding, runs, NOTHING) is is_right
        assert finding.unsettled == unsettled
    assert settle(Finding("loss-divided-by-ranks", Event()), [third_run], NOTHING) is False


def test_a_script_that_trains_on_no_loader_has_no_batches_that_grow() -> None:
    with pytest.raises(UsageError, match="trains on no DataLoader"):
        second(["x.py"], 2, None, NOTHING)
    assert second(["x.py", "--batch", "4"], 2, "--batch", NOTHING).script == ["x.py", "--batch", "8"]
