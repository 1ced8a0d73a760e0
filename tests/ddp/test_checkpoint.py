"""ddp/checkpoint.py: whole or absent, nothing executed, and never another run's."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cli import UsageError
from ddp import checkpoint
from ddp.checkpoint import Checkpoint

CONFIG = {
    "model": "mlp", "dataset": "glyphs", "train_samples": None, "seed": 0, "batch_size": 144, "optimizer": "sgd",
    "lr": 0.1, "run_dir": "a",
}  # fmt: skip


def example(step: int) -> Checkpoint:
    return {
        "format": checkpoint.FORMAT, "epoch": step // 10, "step": step, "model": {"w": torch.full((300,), float(step))},
        "optimizer": {"state": {}, "param_groups": []}, "scaler": {}, "config": CONFIG,
    }  # fmt: skip


def encoded() -> bytes:
    buffer = io.BytesIO()
    torch.save(example(10), buffer)
    return buffer.getvalue()


ENCODED = encoded()


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, example(10), keep_last=2)
    loaded = checkpoint.load(tmp_path)
    assert loaded["step"] == 10
    torch.testing.assert_close(loaded["model"]["w"], torch.full((300,), 10.0))


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    for step in (10, 20, 100, 30):
        checkpoint.save(tmp_path, example(step), keep_last=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000030.pt", "step-00000100.pt"]
    assert checkpoint.load(tmp_path)["step"] == 100


def test_a_failed_save_leaves_the_one_before_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, example(10), keep_last=1)

    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(UsageError, match=r"step-00000020\.pt cannot be written \(No space left on device\)"):
        checkpoint.save(tmp_path, example(20), keep_last=1)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000010.pt"]
    assert checkpoint.load(tmp_path)["step"] == 10


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no checkpoint"):
        checkpoint.load(tmp_path)


@settings(max_examples=60)
@given(length=st.integers(0, len(ENCODED) - 1))
def test_a_truncated_file_is_named(length: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoints", "step-00000010.pt")
        path.parent.mkdir()
        path.write_bytes(ENCODED[:length])
        with pytest.raises(
            UsageError, match=r"step-00000010\.pt is damaged or unreadable .*start again with --overwrite"
        ):
            checkpoint.load(Path(folder))


@settings(max_examples=200)
@given(position=st.integers(0, len(ENCODED) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_or_harmless(position: int, bit: int) -> None:
    damaged = bytearray(ENCODED)
    damaged[position] ^= 1 << bit
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoints", "step-00000010.pt")
        path.parent.mkdir()
        path.write_bytes(damaged)
        with contextlib.suppress(UsageError):  # anything else is a traceback
            loaded = checkpoint.load(Path(folder))
            torch.testing.assert_close(loaded["model"]["w"], torch.full((300,), 10.0), rtol=0, atol=0)
            assert (loaded["step"], loaded["config"]) == (10, CONFIG)


class Malicious:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


@pytest.mark.parametrize("write", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, 2))])
def test_code_in_a_checkpoint_is_not_executed(tmp_path: Path, write: Any) -> None:
    checkpoint.save(tmp_path, example(10), keep_last=2)
    write({"model": Malicious(tmp_path / "executed")}, tmp_path / "checkpoints" / "step-00000020.pt")
    with pytest.raises(
        UsageError, match=r"step-00000020\.pt is damaged or unreadable .*remove it to continue from step-00000010\.pt"
    ):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [{"w": torch.zeros(3)}, [1, 2], example(10) | {"format": 99}])
def test_a_foreign_file_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "checkpoints").mkdir()
    torch.save(content, tmp_path / "checkpoints" / "step-00000010.pt")
    with pytest.raises(UsageError, match=r"not a checkpoint of ddp\.train|has format 99"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "resnet18"), ("dataset", "fashion-mnist"), ("seed", 1), ("batch_size", 288), ("optimizer", "adam")],
)
def test_another_run_s_checkpoint_is_refused_by_name(name: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"started with {flag} {CONFIG[name]}, not {value}"):
        checkpoint.check_identity(example(10), CONFIG | {name: value})


def test_settings_that_an_older_run_lacks_are_no_difference() -> None:
    assert checkpoint.check_identity(example(10), CONFIG | {"image_size": None}) == []
    with pytest.raises(UsageError, match="started with --image-size None, not 64"):
        checkpoint.check_identity(example(10), CONFIG | {"image_size": 64})


def test_other_differences_are_reported() -> None:
    assert checkpoint.check_identity(example(10), CONFIG | {"lr": 0.2, "run_dir": "b"}) == [
        "--lr was 0.1 and is now 0.2"
    ]
