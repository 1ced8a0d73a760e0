"""Checkpoints: a run's state at the end of an epoch, from which it continues bit for bit.

Because all randomness here is a function of (seed, epoch, step, rank), the state is small: weights, the optimizer's and
the scaler's tensors, and two integers. Rank 0 writes a file beside its place, syncs and renames it: a reader finds a
whole checkpoint or none. On resuming, rank 0 reads it onto the CPU and sends it to all, so that one node's disk is
enough and nobody's weights land on rank 0's GPU (pytorch#23138).
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn

from common.cli import UsageError, flag_of
from common.process_group import Place
from common.run_directory import write_bytes

FORMAT = 1
FOLDER = "checkpoints"
# What a continued run must share with the one that wrote the checkpoint, or it would be another run.
IDENTITY = (
    "model", "dataset", "min_images_per_person", "image_size", "train_samples", "seed", "batch_size", "optimizer"
)  # fmt: skip


class Checkpoint(TypedDict):
    """What a file holds. ``epoch`` and ``step`` count those that are complete; ``config`` is JSON-like."""

    format: int
    epoch: int
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    config: dict[str, Any]


def save(run_dir: Path, checkpoint: Checkpoint, keep_last: int) -> Path:
    """Write a checkpoint atomically and remove all but the newest ``keep_last``. For rank 0.

    :raises UsageError: when it cannot be written; the ones before it are untouched
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{checkpoint['step']:08d}.pt"
    encoded = io.BytesIO()  # in memory first: torch.save would bury a full disk's error in one of its own
    torch.save(checkpoint, encoded)
    try:
        write_bytes(path, encoded.getbuffer())
        for old in _all(run_dir)[:-keep_last]:
            old.unlink()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): make room, then continue with --resume"
        ) from error
    return path


def load(run_dir: Path) -> Checkpoint:
    """Read a run's newest checkpoint, all tensors on the CPU; nothing in the file is executed.

    :raises UsageError: when there is none, or it is damaged, or another version's
    """
    paths = _all(run_dir)
    if not paths:
        raise UsageError(
            f"{run_dir / FOLDER} holds no checkpoint: no run was begun there, or none of its epochs was finished"
        )
    path = paths[-1]
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load itself does not look at the checksums
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"checksum of {damaged}")
        checkpoint: Checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # which one, for a damaged file, depends on where the damage lies
        remedy = f"remove it to continue from {paths[-2].name}" if len(paths) > 1 else "start again with --overwrite"
        raise UsageError(f"{path} is damaged or unreadable ({type(error).__name__}): {remedy}") from error
    if not isinstance(checkpoint, dict) or set(checkpoint) != set(Checkpoint.__annotations__):
        raise UsageError(f"{path} is not a checkpoint of ddp.train: remove it, or start again with --overwrite")
    if checkpoint["format"] != FORMAT:
        raise UsageError(
            f"{path} has format {checkpoint['format']}, this version reads {FORMAT}: use the one that wrote it"
        )
    return checkpoint


def load_together(run_dir: Path, place: Place) -> Checkpoint:
    """:func:`load` on rank 0, which sends it to all others.

    :raises UsageError: on every rank
    """
    checkpoint: list[Checkpoint | None] = [None]
    with place.together():
        if place.is_main:
            checkpoint[0] = load(run_dir)
    dist.broadcast_object_list(checkpoint, src=0, device=place.device)
    assert checkpoint[0] is not None
    return checkpoint[0]


def load_model(network: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into a network that was built for the data that is there now.

    :raises UsageError: when that has another number of classes, or other images
    """
    try:
        network.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise UsageError(
            f"the run's {checkpoint['config']['model']} was trained on other data than is there now, with other classes "
            "or images: give its --data-dir"
        ) from error


def check_identity(checkpoint: Checkpoint, config: dict[str, Any]) -> list[str]:
    """Refuse to continue as another run; report what else differs.

    :param config: the present run's, JSON-like as the checkpoint's
    :returns: a line for each other setting that differs and that may change the result
    :raises UsageError: for another model, data set, seed, global batch or optimizer
    """
    before = checkpoint["config"]
    for name in IDENTITY:
        if before.get(name) != config.get(name):  # an older version's run has not all of them
            raise UsageError(
                f"--resume: the run was started with {flag_of(name)} {before.get(name)}, not {config.get(name)}: "
                f"give {flag_of(name)} {before.get(name)}, or another --run-dir"
            )
    return [
        f"{flag_of(name)} was {before[name]} and is now {config[name]}"
        for name in config
        if name in before and name not in (*IDENTITY, "resume", "overwrite", "run_dir") and before[name] != config[name]
    ]


def _all(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    folder = run_dir / FOLDER
    return sorted(p for p in folder.iterdir() if re.fullmatch(r"step-\d{8}\.pt", p.name)) if folder.is_dir() else []
