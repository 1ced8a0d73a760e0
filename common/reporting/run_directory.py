"""A run's own directory: ``config.json``, ``metrics.jsonl``, per-rank logs, figures and checkpoints.

Never overwritten unless it was asked for, and then only when it is a run's directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import UsageError
from common.resilience.run_lock import LOCK_FILE, RunLock

CONFIG_FILE = "config.json"
LOG_FOLDER = "logs"
LAUNCH_FILE = "launch.json"  # who has started it; see ddp/resilience/restarts.py
SCRATCH = re.compile(r"\.(.+\.)?[0-9a-f]{32}")  # files beside those that are written atomically


def prepare(folder: Path, *, overwrite: bool, resume: bool = False, resumable: bool = True) -> RunLock:
    """Create a run's directory, or accept the one to resume. For rank 0, before anything is written.

    :param resumable: whether the command has a ``--resume`` to speak of
    :returns: the lock on it, to be kept as long as the run lasts
    :raises UsageError: when it exists (without ``resume`` or ``overwrite``), is not a run's, has nothing to resume, is in
        use, or cannot be written
    """
    if resume and overwrite:
        raise UsageError("--resume continues the run in its directory and --overwrite deletes it: give one of them")
    try:
        exists = folder.is_dir() and any(not _precedes_a_run(entry.name) for entry in folder.iterdir())
        is_run = holds_run(folder)
        if resume and not is_run:
            raise UsageError(f"--resume: {folder} holds no run; start it without --resume, or name its --run-dir")
        if exists and not is_run:
            raise UsageError(f"--run-dir {folder} holds something that is not a run: give another, or an empty one")
        if exists and not (resume or overwrite):
            remedies = f"{'--resume to continue it, ' * resumable}--overwrite to delete it, or another folder"
            raise UsageError(f"--run-dir {folder} holds a run: give {remedies}")
        require_writable(folder)
        lock = RunLock(folder)
        if exists and overwrite:
            # Not the folder itself, which may be a link or somebody's current one; and last what says that it is a run's.
            for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == CONFIG_FILE):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name != LOCK_FILE:
                    entry.unlink()
        for scratch in folder.glob(".*"):  # left by a run that was killed while it wrote
            if SCRATCH.fullmatch(scratch.name):
                scratch.unlink()
        (folder / LOG_FOLDER).mkdir(exist_ok=True)
        return lock
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


def _precedes_a_run(name: str) -> bool:
    """Whether the entry is written before ``config.json``: what a run leaves that was killed before it began."""
    return name in (LOCK_FILE, LOG_FOLDER, LAUNCH_FILE) or SCRATCH.fullmatch(name) is not None


def holds_run(folder: Path) -> bool:
    """Whether a run was begun there: its ``config.json`` is one of ours; many things have a file of that name."""
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
    sync_folder(path.parent)  # which holds the name


def sync_folder(folder: Path) -> None:
    """Make the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A block that writes a part of a run that can be resumed.

    :raises UsageError: naming ``path``, for an OSError in the block
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): {'make room' if full else 'mend that'}, then continue with "
            "--resume"
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a reader finds the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    scratch.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(scratch, path)
