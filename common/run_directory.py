"""A run's own directory: ``config.json``, ``metrics.jsonl``, per-rank logs, figures and checkpoints.

Never overwritten unless it was asked for, and then only when it is a run's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.cli import UsageError

CONFIG_FILE = "config.json"
LOG_FOLDER = "logs"


def prepare(folder: Path, *, overwrite: bool, resume: bool = False, resumable: bool = True) -> None:
    """Create a run's directory, or accept the one to resume. For rank 0, before anything is written.

    :param resumable: whether the command has a ``--resume`` to speak of
    :raises UsageError: when it exists (without ``resume`` or ``overwrite``), is not a run's, has nothing to resume, or
        cannot be written
    """
    if resume and overwrite:
        raise UsageError("--resume continues the run in its directory and --overwrite deletes it: give one of them")
    try:
        exists = folder.is_dir() and any(folder.iterdir())
        is_run = _is_run(folder)
        if resume and not is_run:
            raise UsageError(f"--resume: {folder} holds no run; start it without --resume, or name its --run-dir")
        if exists and not is_run:
            raise UsageError(f"--run-dir {folder} holds something that is not a run: give another, or an empty one")
        if exists and not (resume or overwrite):
            remedies = f"{'--resume to continue it, ' * resumable}--overwrite to delete it, or another folder"
            raise UsageError(f"--run-dir {folder} holds a run: give {remedies}")
        if exists and overwrite:
            for entry in folder.iterdir():  # not the folder itself, which may be a link or somebody's current one
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        require_writable(folder)
    except OSError as error:
        raise UsageError(f"--run-dir {folder} cannot be written: {error}") from error


def require_writable(folder: Path) -> None:
    """Make the directory on this node, if it is not there, and try it.

    :raises UsageError: when it cannot be written
    """
    try:
        (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
        _try_writing(folder)
    except OSError as error:
        raise UsageError(f"--run-dir {folder} cannot be written: {error}") from error


@contextlib.contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """A block that writes a benchmark's results.

    :raises UsageError: when they cannot be written
    """
    try:
        yield
    except FileExistsError as error:
        raise UsageError(f"--output {folder} is a file: give a folder") from error
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be written: {error.strerror or error}") from error


def prepare_output(folder: Path) -> None:
    """Make a benchmark's folder and try it, before the hours that may lie between now and its results.

    :raises UsageError: when it cannot be written
    """
    with results_in(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _try_writing(folder)


def _try_writing(folder: Path) -> None:
    """:raises OSError: when it cannot be written"""
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        probe.write_bytes(bytes(4096))  # an empty file would fit on a full disk
    finally:
        probe.unlink(missing_ok=True)


def _is_run(folder: Path) -> bool:
    """Whether the folder's ``config.json`` is one of ours; many things have a file of that name."""
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return isinstance(content, dict) and "dataset_fingerprint" in content


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically, and so that it outlives a power cut: a reader finds the old file or the new one whole.

    :raises OSError: when it cannot be written; the old file is untouched
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # it is the folder that holds the name
    finally:
        os.close(folder)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a reader finds the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    scratch.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(scratch, path)
