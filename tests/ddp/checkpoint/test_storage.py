"""ddp/checkpoint/storage.py: what is written is read again bit for bit, and prune and clean never remove the last one."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from ddp.checkpoint import clean, list_checkpoints, prune, storage
from ddp.checkpoint.storage import FOLDER, KINDS
from tests.ddp.checkpoint.samples import (
    FILES,
    NEWER,
    OLDER,
    assert_is,
    bits,
    in_a_process,
    manifest,
    write,
)

# A checkpoint is read as it was written


def test_what_was_written_is_read(tmp_path: Path) -> None:
    odd = {
        "nan": math.nan,
        "inf": -math.inf,
        "third": 1 / 3,
        "zero": -0.0,
        "text": "läuft\n\ud800",
        "nested": {"b": [None]},
    }
    model = {
        "bf16": torch.randn(7, 5).bfloat16(),
        "0-d": torch.tensor(math.pi, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([math.nan, -math.nan, math.inf, -0.0]),
        "transposed": torch.randn(4, 3).t(),
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }
    whole = {"model": model, "optimizer": {"state": {}}, "ranks": [{"rng": torch.get_rng_state()}, None]}
    before = dataclasses.replace(manifest(123), config=odd)
    path = storage.write(tmp_path, before, whole)

    assert path == tmp_path / FOLDER / "epoch-0012-step-00000123"
    assert sorted(os.listdir(path)) == sorted(FILES)
    found = storage.newest(tmp_path)
    assert found is not None and found.path == path
    assert bits(vars(found.manifest)) == bits(vars(before))
    assert bits({kind: storage.read(path, kind) for kind in KINDS}) == bits(whole)
    assert storage.read(path, "model")["channels_last"].is_contiguous(memory_format=torch.channels_last)


def test_the_encoded_model_is_not_held_in_memory(tmp_path: Path) -> None:
    """Measured in a new process, whose peak memory no other test has raised."""
    size = 128 << 20
    assert in_a_process(_written_in, tmp_path, size) < size / 4


def _written_in(run_dir: Path, size: int) -> int:
    """Bytes by which writing a model of ``size`` bytes raises the peak memory of this process."""
    model = {"w": torch.ones(size // 4)}

    def peak() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

    before = peak()
    storage.write(run_dir, manifest(1), {"model": model, "optimizer": {}, "ranks": []})
    return peak() - before


def test_names_sort_in_time(tmp_path: Path) -> None:
    steps = [5, 100_000_000, 70, 99_999_999, 123]  # one has more digits than the others
    for step in steps:
        write(tmp_path, step)
    for other in ("damaged-" + OLDER, ".saving-1", "notes.txt", OLDER + "~"):
        (tmp_path / FOLDER / other).mkdir()
    paths = list_checkpoints(tmp_path / FOLDER)
    assert [storage.verify(path).step for path in paths] == sorted(steps)
    assert paths[0].name == "epoch-0000-step-00000005"


# Which checkpoints are kept


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):
        write(tmp_path, step)
    (tmp_path / FOLDER / ("damaged-" + OLDER)).mkdir()
    prune(tmp_path / FOLDER, 2, keep=[NEWER])
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / FOLDER)] == ["20", "40", "50"]
    prune(tmp_path / FOLDER, 2)
    assert [path.name[-2:] for path in list_checkpoints(tmp_path / FOLDER)] == ["40", "50"]
    assert len(os.listdir(tmp_path / FOLDER)) == 3  # the damaged one stays
    assert_is(tmp_path / FOLDER / "epoch-0005-step-00000050", 50)


@pytest.mark.parametrize("damaged", [False, True])
def test_one_of_the_same_name_is_replaced(tmp_path: Path, damaged: bool) -> None:
    path = write(tmp_path, 20)
    if damaged:
        (path / "model.pt").write_bytes(b"")
    write(tmp_path, 20)
    assert_is(path, 20)
    assert os.listdir(tmp_path / FOLDER) == [NEWER]


def test_clean_removes_what_a_killed_run_left(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for step in (10, 20):
        write(tmp_path, step)
    os.rename(folder / NEWER, folder / f".replaced-{NEWER}-0123")  # killed between the two renames of a replacement
    shutil.copytree(folder / OLDER, folder / f".replaced-{OLDER}-4567")  # killed after them
    for name in (".saving-1", ".removed-1"):
        (folder / name).mkdir()
        (folder / name / "model.pt").touch()
    clean(tmp_path / FOLDER)
    assert sorted(os.listdir(folder)) == [OLDER, NEWER]
    assert_is(folder / NEWER, 20)
