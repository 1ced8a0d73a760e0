"""ddp/checkpoint/directory.py: checkpoints of one's own loop, with a scheduler, an EMA and own state; nothing of the trainer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp.checkpoint import Checkpoint, load, newest, prune, save, verify
from tests.ddp.checkpoint.samples import bits
from tests.support.launch import REPOSITORY, clean_environment

LIFTED = (
    "ddp/checkpoint/directory.py", "ddp/checkpoint/folder.py", "common/files/atomic_files.py", "common/errors.py"
)  # fmt: skip


class Loop:
    """A training loop of one's own: a scheduler, an EMA of the weights, and a generator of random numbers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        self.ema = AveragedModel(self.model, use_buffers=True)
        self.generator = torch.Generator().manual_seed(1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(6, 4, generator=self.generator)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        own = {"generator": self.generator.get_state(), "seen": (3, [1.5, None])}
        return {name: getattr(self, name).state_dict() for name in STATEFUL} | {"own": own}


STATEFUL = ("model", "optimizer", "scheduler", "ema")


def test_a_loop_of_one_s_own_continues_bit_for_bit(tmp_path: Path) -> None:
    whole, part, resumed = Loop(), Loop(), Loop()
    whole.train(10)
    for step in range(1, 5):
        part.train(1)
        save(tmp_path / "checkpoints", step, part.state(), {"seed": 0, "rate": 0.1})
    found = newest(tmp_path / "checkpoints")
    assert found is not None and found == verify(found.path)
    assert found == Checkpoint(tmp_path / "checkpoints" / "step-00000004", 4, {"seed": 0, "rate": 0.1})
    for name in STATEFUL:
        getattr(resumed, name).load_state_dict(load(found.path, name))
    resumed.generator.set_state(load(found.path, "own")["generator"])
    resumed.train(6)
    assert bits(resumed.state()) == bits(whole.state())


def test_sha256sum_reads_the_digests(tmp_path: Path) -> None:
    program = shutil.which("sha256sum")
    if program is None:
        pytest.skip("there is no sha256sum here")
    path = save(tmp_path, 4, {"model": {"w": torch.ones(3)}, "own": 1})
    done = subprocess.run(
        [program, "--check", "--strict", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True
    )
    names = ["model.pt", "own.pt", "manifest.json"]
    assert done.stdout.splitlines() == [f"{name}: OK" for name in names]
    assert sorted([*names, "SHA256SUMS"]) == sorted(os.listdir(path))


def test_without_any_there_is_no_newest_and_the_newest_is_never_pruned(tmp_path: Path) -> None:
    assert newest(tmp_path / "none") is None
    with pytest.raises(ValueError, match="give at least 1"):
        prune(tmp_path, keep_last=0)


class NotTensors:
    """An object that ``torch.save`` pickles and ``torch.load(weights_only=True)`` refuses."""


@pytest.mark.parametrize(
    ("error", "arguments", "words"),
    [
        (ValueError, {"state": {"../model": {}}}, "cannot be a file's name"),
        (ValueError, {"state": {}, "name": "step-00000004"}, "does not end in step-00000005"),
        (TypeError, {"state": {}, "facts": {"path": Path()}}, "not JSON serializable"),
        (TypeError, {"state": {"own": NotTensors()}}, r"'own' holds what torch\.load\(weights_only=True\) refuses"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(
    tmp_path: Path, error: type[Exception], arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(error, match=words):
        save(tmp_path, 5, **arguments)
    assert os.listdir(tmp_path) == []


def test_four_files_are_all_that_is_to_be_copied(tmp_path: Path) -> None:
    for name in LIFTED:
        target = tmp_path / "lifted" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, target)
    script = (
        "import sys; from ddp.checkpoint.directory import __file__, save, newest; heavy = 'torch' in sys.modules\n"
        "import torch; save('checkpoints', 3, {'w': torch.ones(2)}); print(newest('checkpoints').step, heavy, __file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**clean_environment(), "PYTHONPATH": str(tmp_path / "lifted")},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"3 False {tmp_path / 'lifted' / LIFTED[0]}\n", "")
