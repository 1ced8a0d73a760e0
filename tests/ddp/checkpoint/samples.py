"""A run's checkpoints for tests: small ones, their comparison bit for bit, and forged ones."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp.checkpoint import storage
from ddp.checkpoint.storage import FOLDER, KINDS, Manifest
from tests.support.launch import FORK_SERVER

STATE_FILES = ("model.pt", "optimizer.pt", "ranks.pt")
FILES = (*STATE_FILES, "manifest.json", "SHA256SUMS")
OLDER, NEWER = "epoch-0001-step-00000010", "epoch-0002-step-00000020"


def manifest(step: int) -> Manifest:
    return Manifest(
        step=step, epoch=step // 10, step_in_epoch=step % 10, world_size=2, dataset_length=432, dataset_fingerprint="abc",
        config={"model": "mlp", "lr": 0.1, "data_dir": None},
        progress={"scaler": {}, "windows": [], "skipped_steps": 0, "accuracy": step / (step + 100), "best": None},
        versions={"torch": torch.__version__},
    )  # fmt: skip


def contents(step: int) -> dict[str, Any]:
    """A few hundred bytes of tensors, other ones for every step."""
    return {
        "model": {"w": torch.full((30,), step + 1 / 3), "bn.num_batches_tracked": torch.tensor(step)},
        "optimizer": {"state": {0: {"momentum_buffer": torch.full((30,), -step - 0.1)}}, "param_groups": [{"lr": 0.1}]},
        "ranks": [{"rng": torch.arange(16, dtype=torch.uint8) + step + rank} for rank in range(2)],
    }


def write(run_dir: Path, step: int) -> Path:
    return storage.write(run_dir, manifest(step), contents(step))


def bits(value: Any) -> Any:
    """``value`` with tensors as (dtype, shape, bytes), so that == compares bit for bit, and nan equals nan."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list | tuple) else value


def assert_is(path: Path, step: int) -> None:
    """That ``path`` holds what :func:`write` wrote at ``step``."""
    found = storage.verify(path)
    assert found == manifest(step)
    assert bits({kind: storage.read(path, kind) for kind in KINDS}) == bits(contents(step))


def litter(run_dir: Path) -> list[str]:
    return [name for name in os.listdir(run_dir / FOLDER) if name.startswith(".")]


def forge(path: Path, **changes: Any) -> None:
    """Change fields of a manifest, or of the facts in it, and make all digests match the files as they are now.

    :param changes: ``...`` removes the field; with none, only the sizes and digests are renewed
    """
    manifest = json.loads((path / "manifest.json").read_bytes())
    for name, value in changes.items():
        fields = manifest if name in ("format", "step", "files", "facts") else manifest["facts"]
        fields[name] = value
        if value is ...:
            del fields[name]
    if "files" not in changes:
        manifest["files"] = {name: (path / name).stat().st_size for name in manifest["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    sign(path)


def sign(path: Path) -> None:
    """Make ``SHA256SUMS`` match the files as they are now."""
    names = [name for name in FILES if name != "SHA256SUMS"]
    digests = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in names}
    (path / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))


class Malicious:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The value of ``function(*arguments)`` in a new process."""
    with FORK_SERVER.Pool(1) as pool:
        return pool.apply(function, arguments)
