"""The second run: on one rank with the batches of all ranks, it says what differs, and confirms or clears what was suspected."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import UsageError
from common.foreign_script.start import command
from ddp.audit.detectors import find
from ddp.audit.finding import Finding
from ddp.audit.settle import settle
from ddp.audit.vary import second, third, vary
from ddp.audit.watch.event_types import Event
from tests.ddp.audit.forked import watch

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
    if rank == 0 and counts[1] < 21:
        torch.save(network.state_dict(), __file__ + ".pt")
    dist.all_reduce(counts)
"""
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
    (variation,) = vary([plan], base, watch)
    verdicts = {finding.name: settle(finding, [variation], base) for finding in found if finding.is_suspicion}
    wrong = [one.name for one in [*found, variation.finding] if one and one.is_wrong]
    return variation.text, wrong, [name for name, is_right in verdicts.items() if is_right is None]


@pytest.mark.examples
@pytest.mark.parametrize(
    ("changes", "said", "wrong"),
    [
        ([], "; 2 metrics are equal", []),
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
        ([("    dist.all_reduce(counts)\n", BEST)], "steps [8, 16], and after [] on 1 rank", ["vary-ranks"]),
        ([("train, test = TensorDataset(", NOISY)], "samples are augmented", ["same-augmentation"]),
        ([("lr=0.1", "lr=0.1 * ranks")], "since the learning rate grows with the number of ranks", []),
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
    assert found == wrong
    assert unsettled == []


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
        variations = list(vary([third([str(path)], 2, finding)], base, watch))
        assert settle(finding, variations, base) is is_right


def test_a_suspicion_is_a_hint_until_a_run_proves_it() -> None:
    finding = Finding("samples-left-out", Event(where="x.py:1"), unsettled="there was no second run")
    assert str(finding).startswith("x.py:1: hint: samples-left-out: samples are seen by no rank in an epoch (step 0).")
    assert "It is not settled: there was no second run." in str(finding)
    finding.proof = "on 1 rank: epoch 0 has 64 samples"
    assert finding.is_wrong
    assert str(finding).startswith("x.py:1: samples-left-out: ")


def test_each_node_has_an_agent() -> None:
    agents, *rest = command(["train.py", "--x"], 4, "auto", nodes=2)
    assert Path(agents).name == "agents.py"
    assert rest == ["2", "2", "train.py", "--x"]
