"""Checkpoints on disk: each is a folder that is there complete or not at all, and whose every byte is checked.

    RUN_DIR/checkpoints/epoch-0003-step-00000123/    epochs complete, optimizer steps done
        model.pt          state dict of the plain module
        optimizer.pt      state dict of the optimizer
        ranks.pt          a list: for each rank, what differs between ranks
        manifest.json     the run's facts, and the size and SHA-256 of the files above (ddp/checkpoint/manifest.py)

A checkpoint is written into a scratch folder, synced and renamed: a process that is killed at any moment leaves the
checkpoints that were there before. What a disk does to them afterwards is met by the digests (``torch.load`` does not look
at the checksums of its own format): a damaged checkpoint is reported, and the one before it taken. Nothing in a file is
executed, whoever wrote it (``weights_only``).

All of this is for rank 0 or for a process that is alone; nothing here communicates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import nn

from common.errors import UsageError
from common.reporting.run_directory import sync_folder, writing
from ddp.checkpoint.manifest import FORMAT, KINDS, MANIFEST, Damaged, Manifest, encode, facts_of, read_manifest

logger = logging.getLogger(__name__)

FOLDER = "checkpoints"
NAME = re.compile(r"epoch-(\d{4,})-step-(\d{8,})")
SAVING, REPLACED, REMOVED = ".saving-", ".replaced-", ".removed-"  # what is on its way into the folder, or out of it


def write(run_dir: Path, manifest: Manifest, contents: dict[str, Any]) -> Path:
    """Write a checkpoint, in the place of one of the same name if there is any.

    The tensors go to the disk one by one, from wherever they are; no copy of the whole is made.

    :param manifest: its ``files`` are filled in here
    :param contents: ``model``, ``optimizer`` and ``ranks``, as ``torch.load(weights_only=True)`` takes them
    :returns: the checkpoint's folder
    :raises UsageError: when it cannot be written; those that were there before are untouched
    """
    folder = run_dir / FOLDER
    path, scratch = folder / manifest.name, folder / f"{SAVING}{uuid.uuid4().hex}"
    with writing(path):
        try:
            if not folder.is_dir():
                folder.mkdir()
                sync_folder(run_dir)
            scratch.mkdir()
            files = {f"{kind}.pt": save_file(scratch / f"{kind}.pt", contents[kind]) for kind in KINDS}
            with open(scratch / MANIFEST, "xb") as file:
                file.write(encode(dataclasses.replace(manifest, files=files)))
                file.flush()
                os.fsync(file.fileno())
            sync_folder(scratch)
            _move_into_place(scratch, path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint; files that it does not name are ignored.

    :raises Damaged: when it is not as it was written, or cannot be read
    :raises UsageError: when a newer version wrote it
    """
    manifest = read_manifest(path)
    if path.name != manifest.name:
        raise Damaged(path, f"{MANIFEST} is that of {manifest.name}")
    for name, expected in manifest.files.items():
        try:
            found = facts_of(path / name)
        except OSError as error:
            raise Damaged(path, f"{name} cannot be read ({error.strerror})") from error
        if found["bytes"] != expected["bytes"]:
            raise Damaged(path, f"{name} has {found['bytes']} bytes instead of {expected['bytes']}")
        if found != expected:
            raise Damaged(path, f"{name} has other content than was written (SHA-256)")
    return manifest


def read(path: Path, kind: str) -> Any:
    """A file of a verified checkpoint, its tensors on the CPU; nothing in it is executed.

    :param kind: ``"model"``, ``"optimizer"`` or ``"ranks"``
    :raises Damaged: when it holds something else: whoever forges a file can forge its digest too
    """
    try:
        content = torch.load(path / f"{kind}.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # which one depends on what the file is
        raise Damaged(path, f"{kind}.pt cannot be loaded ({type(error).__name__})") from error
    if not isinstance(content, KINDS[kind]):
        raise Damaged(path, f"{kind}.pt holds a {type(content).__name__} instead of a {KINDS[kind].__name__}")
    return content


def load_weights(network: nn.Module, path: Path) -> None:
    """Put a verified checkpoint's weights into a network, wherever that is.

    They are read onto the CPU and copied from there, so that no device ever holds them twice (pytorch#23138).

    :raises UsageError: when the network was built for other data: other classes, or other images
    """
    weights = read(path, "model")
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise UsageError(
            f"{path} was trained on other data than is there now, with other classes or images: give its --data-dir"
        ) from error


def all_of(run_dir: Path) -> list[Path]:
    """A run's checkpoints, oldest first, by their names alone: some may be damaged.

    :raises UsageError: when there are none but those of an older version, or the folder cannot be read
    """
    folder = run_dir / FOLDER
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror})") from error
    found = [(int(match[1]), int(match[2]), match[0]) for name in names if (match := NAME.fullmatch(name))]
    if not found and any(re.fullmatch(r"step-\d{8}\.pt", name) for name in names):
        raise UsageError(
            f"{folder} holds checkpoints of format 1, this version reads {FORMAT}: use the one that wrote them, or start "
            "again with --overwrite"
        )
    return [folder / name for _, _, name in sorted(found)]


def newest(run_dir: Path, *, set_aside: bool = False) -> tuple[Path, Manifest] | None:
    """A run's newest checkpoint that is whole; damaged ones are reported and passed over.

    :param set_aside: rename those to ``damaged-...``, so that they count as checkpoints no more; for the process that
        writes into the run
    :returns: its folder and manifest, or None when the run has no checkpoint at all
    :raises UsageError: when all are damaged, or the first that is whole is of a newer version
    """
    damaged: list[Damaged] = []
    for path in reversed(all_of(run_dir)):
        try:
            manifest = verify(path)
        except Damaged as error:
            logger.warning("%s", error)
            damaged.append(error)
            continue
        if set_aside:  # only now: a run of which all are damaged must not look like one that has none
            for one in damaged:
                _set_aside(one.path)
        return path, manifest
    if damaged:
        raise UsageError(
            f"{run_dir / FOLDER} holds no checkpoint that is whole ({len(damaged)} damaged; the newest: {damaged[0]}): "
            "put back a copy, or start again with --overwrite"
        )
    return None


def prune(run_dir: Path, keep_last: int, best: str | None) -> None:
    """Remove all checkpoints but the newest ``keep_last`` (at least 1) and the one named ``best``.

    To be called after :func:`write`, when the newest is known to be whole.

    :raises UsageError: when they cannot be removed
    """
    removed = []
    with writing(run_dir / FOLDER):
        for path in all_of(run_dir)[:-keep_last]:
            if path.name != best:
                removed.append(path.with_name(f"{REMOVED}{uuid.uuid4().hex}"))
                os.rename(path, removed[-1])  # first of all, so that no half of it is ever seen under its name
        if removed:
            sync_folder(run_dir / FOLDER)
        for path in removed:
            _remove(path)


def clean(run_dir: Path) -> None:
    """Remove what a killed process left half written or half removed; for the process that writes into the run.

    :raises UsageError: when it cannot be removed
    """
    folder = run_dir / FOLDER
    with writing(folder):
        for entry in list(folder.iterdir()) if folder.is_dir() else []:
            place = folder / entry.name.removeprefix(REPLACED).rpartition("-")[0]
            if entry.name.startswith(REPLACED) and not os.path.lexists(place):
                os.rename(entry, place)  # it was killed before it could put the new one there
            elif entry.name.startswith((SAVING, REPLACED, REMOVED)):
                _remove(entry)


def save_file(path: Path, content: Any) -> dict[str, Any]:
    """``torch.save`` into a new file, hashed on the way and synced.

    :returns: ``{"bytes": int, "sha256": hex digits}``
    :raises OSError: when it cannot be written; what there is of it is left
    """
    stop = None
    with open(path, "xb") as file:
        stream = _HashingStream(file)
        try:
            torch.save(content, cast(IO[bytes], stream))  # of which it calls only write and flush
        except RuntimeError as error:
            # A signal's handler raised in the middle, and torch's complaint about the unfinished archive has buried that.
            if not isinstance(error.__context__, KeyboardInterrupt | SystemExit):
                raise
            stop = error.__context__
        if stop is not None:
            raise stop
        if stream.error is not None:
            raise stream.error
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": stream.bytes, "sha256": stream.digest.hexdigest()}


class _HashingStream:
    """The file object that ``torch.save`` writes to. The first error is kept in ``error``, and what follows is dropped:
    raised from here it would cross torch's C++, which makes another of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None
        self._file = file

    def write(self, data: memoryview) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
            self.digest.update(data)
            self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Left to the one who opened the file."""


def _move_into_place(scratch: Path, path: Path) -> None:
    """Give a complete checkpoint its name. A folder cannot be renamed onto another, so that one is moved away first."""
    replaced = path.with_name(f"{REPLACED}{path.name}-{uuid.uuid4().hex}")
    occupied = os.path.lexists(path)
    try:
        if occupied:
            os.rename(path, replaced)
        os.rename(scratch, path)
    except BaseException:
        if os.path.lexists(replaced) and not os.path.lexists(path):
            os.rename(replaced, path)
        raise
    try:
        sync_folder(path.parent)
    finally:
        if occupied:
            _remove(replaced)


def _set_aside(path: Path) -> None:
    """:raises UsageError: when it cannot be renamed"""
    names = (f"damaged-{path.name}{number}" for number in ("", *(f"-{i}" for i in range(2, 10**6))))
    target = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    with writing(path):
        os.rename(path, target)
    logger.warning("%s is now %s", path.name, target.name)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
