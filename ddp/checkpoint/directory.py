"""A directory of checkpoints for any training loop: each is complete or absent.

    DIRECTORY/step-00000123/    one checkpoint; its files are those of ddp/checkpoint/folder.py

A checkpoint is written into a scratch folder, synced to the disk and renamed. A process that is killed at any moment
leaves the earlier checkpoints as they were. A damaged checkpoint is reported, and the one before it is used.

One process writes: rank 0, or a process that is alone. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.files.atomic_files import sync_folder
from ddp.checkpoint.folder import Checkpoint, Damaged, complete, verify, write_entry

logger = logging.getLogger(__name__)

NAME = re.compile(
    r"([a-z]+-\d+-)*step-\d{8,}", re.ASCII
)  # as in common/files/run_directory.py; this file may be copied
SAVING, REPLACED, REMOVED = ".saving-", ".replaced-", ".removed-"  # folders that are being written or removed


def save(
    directory: str | Path,
    step: int,
    state: Mapping[str, Any],
    facts: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> Path:
    """Write a checkpoint; one of the same name is replaced.

    Tensors are written one after another from where they are; there is no copy of the whole state.

    :param state: by name, anything that ``torch.load(weights_only=True)`` reads: the state dicts of a model, an optimizer,
        a scheduler, an EMA of the weights
    :param facts: small values for people and programs to read, as JSON
    :param name: of the checkpoint's folder, if not ``step-00000123``. It ends so; the numbers in it sort checkpoints
    :returns: the checkpoint's folder
    :raises OSError: when it cannot be written; earlier checkpoints are untouched
    :raises TypeError: when the state holds an object that could not be loaded again, or a fact is not JSON
    :raises ValueError: for a name or key that is no plain word
    """
    end = f"step-{step:08d}"
    path = Path(directory) / (name or end)
    if not NAME.fullmatch(path.name) or not path.name.endswith(end):
        raise ValueError(f"checkpoint name {path.name!r} does not end in {end}")
    with scratch_in(path.parent) as scratch:
        entries = {key: write_entry(scratch, key, content) for key, content in state.items()}
        complete(scratch, step, facts or {}, entries)
        move_into_place(scratch, path)
    return path


@contextlib.contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """The path of a new folder, in which a checkpoint is written. Its remains are removed at the end.

    :raises OSError: when it cannot be made
    """
    scratch = directory / f"{SAVING}{uuid.uuid4().hex}"
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True)
            sync_folder(directory.parent)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def list_checkpoints(directory: str | Path) -> list[Path]:
    """All checkpoints by their names alone, oldest first; some may be damaged.

    :raises UsageError: when the directory cannot be read
    """
    directory = Path(directory)
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{directory} cannot be read ({error.strerror})") from error
    names = sorted(filter(NAME.fullmatch, names), key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    return [directory / name for name in names]


def newest(
    directory: str | Path, *, set_aside: bool = False, remedy: str = "or start in another directory"
) -> Checkpoint | None:
    """The newest checkpoint that is whole; damaged ones are reported and passed over.

    :param set_aside: rename these to ``damaged-...``; for the process that writes into the directory
    :param remedy: what else to do when all are damaged, for the message
    :returns: None when there is no checkpoint at all
    :raises UsageError: when all are damaged, or the newest that is not damaged has another format
    """
    damaged: list[Damaged] = []
    for path in reversed(list_checkpoints(directory)):
        try:
            checkpoint = verify(path)
        except Damaged as error:
            logger.warning("%s", error)
            damaged.append(error)
            continue
        for one in damaged if set_aside else []:
            _set_aside(one.path)  # only now: if all are damaged, the directory must not look as if it never held any
        return checkpoint
    if damaged:
        raise UsageError(
            f"{directory} holds no checkpoint that is whole ({len(damaged)} damaged; the newest: {damaged[0]}): "
            f"restore a copy, {remedy}"
        )
    return None


def prune(directory: str | Path, keep_last: int, keep: Collection[str] = ()) -> None:
    """Remove all checkpoints but the newest ``keep_last`` (at least 1) and those named in ``keep``.

    Call it after :func:`save`, when the newest is known to be whole.

    :raises OSError: when they cannot be removed
    """
    directory = Path(directory)
    if keep_last < 1:
        raise ValueError(f"keep_last {keep_last} would remove the newest checkpoint: give at least 1")
    removed = []
    for path in list_checkpoints(directory)[:-keep_last]:
        if path.name not in keep:
            removed.append(directory / f"{REMOVED}{uuid.uuid4().hex}")
            os.rename(path, removed[-1])  # first, so that a half-removed checkpoint never has a checkpoint's name
    if removed:
        sync_folder(directory)
    for path in removed:
        shutil.rmtree(path)


def clean(directory: str | Path) -> None:
    """Remove what a killed process left half written or half removed; for the process that writes into the directory.

    :raises OSError: when it cannot be removed
    """
    directory = Path(directory)
    for entry in list(directory.iterdir()) if directory.is_dir() else []:
        place = directory / entry.name.removeprefix(REPLACED).rpartition("-")[0]
        if entry.name.startswith(REPLACED) and not place.exists():
            os.rename(entry, place)  # the process was killed before it moved the new one there
            sync_folder(directory)
        elif entry.name.startswith((SAVING, REPLACED, REMOVED)):
            shutil.rmtree(entry)


def move_into_place(scratch: Path, path: Path) -> None:
    """Give a complete checkpoint its name. A folder cannot be renamed onto another, so an older one is moved away first."""
    replaced = path.with_name(f"{REPLACED}{path.name}-{uuid.uuid4().hex}")
    occupied = path.exists()
    try:
        if occupied:
            os.rename(path, replaced)
        os.rename(scratch, path)
    except BaseException:
        if replaced.exists() and not path.exists():
            os.rename(replaced, path)
        raise
    try:
        sync_folder(path.parent)
    finally:
        if occupied:
            shutil.rmtree(replaced)


def _set_aside(path: Path) -> None:
    """:raises OSError: when it cannot be renamed"""
    target, number = path.with_name(f"damaged-{path.name}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"damaged-{path.name}-{number}")
    os.rename(path, target)
    sync_folder(path.parent)
    logger.warning("%s is now %s", path.name, target.name)
