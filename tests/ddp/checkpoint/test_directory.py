"""ddp/checkpoint/directory.py: checkpoints of one's own loop, with any state; nothing of the trainer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp.checkpoint import Checkpoint, load, newest, prune, save, verify
from tests.ddp.checkpoint.samples import bits
from tests.support.launch import REPOSITORY, run_program

LIFTED = (
    "ddp/checkpoint/directory.py", "ddp/checkpoint/folder.py", "common/files/atomic_files.py", "common/errors.py"
)  # fmt: skip


def test_any_state_is_saved_and_found_again(tmp_path: Path) -> None:
    """A whole loop, with a scheduler, is in tests/examples/test_lifted.py."""
    ema = AveragedModel(nn.Linear(4, 2)).state_dict()
    state = {"ema": ema, "own": {"generator": torch.get_rng_state(), "seen": (3, [1.5, None])}}
    for step in range(1, 5):
        path = save(tmp_path / "checkpoints", step, state, {"seed": 0, "rate": 0.1})
    found = newest(tmp_path / "checkpoints")
    assert found == verify(path) == Checkpoint(path, 4, {"seed": 0, "rate": 0.1})
    assert path == tmp_path / "checkpoints" / "step-00000004"
    assert bits({name: load(path, name) for name in state}) == bits(state)


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
    done = run_program(script, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "lifted")})
    assert (done.stdout, done.stderr) == (f"3 False {tmp_path / 'lifted' / LIFTED[0]}\n", "")
