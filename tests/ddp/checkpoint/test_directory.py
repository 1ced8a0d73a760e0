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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp.checkpoint import Damaged, load, newest, prune, save, verify
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
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> None:
        images = torch.randn(6, 4, generator=self.generator)
        self.model(images).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "ema": self.ema.state_dict(),
            "own": {"generator": self.generator.get_state(), "seen": (3, [1.5, None])},
        }

    def restore(self, path: Path) -> None:
        for name in ("model", "optimizer", "scheduler", "ema"):
            getattr(self, name).load_state_dict(load(path, name))
        self.generator.set_state(load(path, "own")["generator"])


def test_a_loop_of_one_s_own_continues_bit_for_bit(tmp_path: Path) -> None:
    whole, part, resumed = Loop(), Loop(), Loop()
    for _ in range(10):
        whole.step()
    for step in range(1, 5):
        part.step()
        save(tmp_path / "checkpoints", step, part.state(), {"seed": 0, "rate": 0.1})
    found = newest(tmp_path / "checkpoints")
    assert found is not None
    assert found == verify(found.path)
    assert (found.step, found.facts) == (4, {"seed": 0, "rate": 0.1})
    assert found.path == tmp_path / "checkpoints" / "step-00000004"
    assert bits(load(found.path, "own")["seen"]) == [bits(3), [bits(1.5), None]]
    resumed.restore(found.path)
    for _ in range(found.step, 10):
        resumed.step()
    assert bits(resumed.state()) == bits(whole.state())


def test_sha256sum_reads_the_digests(tmp_path: Path) -> None:
    program = shutil.which("sha256sum")
    if program is None:
        pytest.skip("there is no sha256sum here")
    path = save(tmp_path, 4, Loop().state())
    command = [program, "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [f"{name}.pt" for name in ("model", "optimizer", "scheduler", "ema", "own")]
    assert done.stdout.splitlines() == [f"{name}: OK" for name in (*names, "manifest.json")]
    assert {*names, "manifest.json", "SHA256SUMS"} == {*os.listdir(path)}
    with open(path / "ema.pt", "r+b") as file:
        file.seek(200)
        file.write(b"\xff\xfe")
    done = subprocess.run(command, cwd=path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ema.pt: FAILED" in done.stdout
    with pytest.raises(Damaged, match=r"ema\.pt has other content than was written"):
        verify(path)


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
        (ValueError, {"state": {"manifest.json": {}}}, "cannot be a file's name"),
        (ValueError, {"state": {}, "name": "last"}, "does not end in step-00000005"),
        (ValueError, {"state": {}, "name": "step-00000004"}, "does not end in step-00000005"),
        (TypeError, {"state": {}, "facts": {"path": Path()}}, "not JSON serializable"),
        (TypeError, {"state": {"own": NotTensors()}}, r"'own' holds what torch\.load\(weights_only=True\) refuses"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(
    tmp_path: Path, error: type[Exception], arguments: dict[str, Any], words: str
) -> None:
    path = save(tmp_path, 4, {"w": torch.ones(1)})
    with pytest.raises(error, match=words):
        save(tmp_path, 5, **arguments)
    assert os.listdir(tmp_path) == [path.name]


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
