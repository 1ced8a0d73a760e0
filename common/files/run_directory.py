"""A run's own directory: ``config.json``, ``metrics.jsonl``, per-rank logs, figures and checkpoints.

It is overwritten only on request, and only if it is a run's directory that holds nothing else. Only what a run writes is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from common.errors import UsageError
from common.files.atomic_files import SCRATCH

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
LOG_FOLDER = "logs"
FLIGHT_RECORDER_FOLDER = "flight-recorder"  # among the logs; see ddp/watchdog/flight_recorder.py
LOCK_FILE = "lock"
LAUNCH_FILE = "launch.json"  # the torchrun agents that have started this run; see ddp/resilience/resume.py
REQUEUE_FILE = "requeue.json"  # exists from a preemption until the next start
METRICS_FILE = "metrics.jsonl"
CHECKPOINT_FOLDER = "checkpoints"
CHECKPOINT = r"([a-z]+-\d+-)*step-\d{8,}"  # a checkpoint's name
RESULTS = ("curves.png", "confusion.png", "samples.png", "result.json")
MODEL_FILE = "model.pt"  # of dataparallel.train
FILES = (CONFIG_FILE, LOCK_FILE, LAUNCH_FILE, REQUEUE_FILE, METRICS_FILE, MODEL_FILE, *RESULTS)
MOST_NAMED = 3

# By paths relative to the run's directory. Below `checkpoints`: damaged ones that were set aside, and what a killed process
# left while it wrote, replaced or removed one.
_WRITTEN = re.compile(
    "|".join(
        (
            *map(re.escape, FILES),
            rf"{LOG_FOLDER}(/rank\d+\.log|/{FLIGHT_RECORDER_FOLDER}(/[\w-]+(/rank\d+)?)?)?",
            rf"{CHECKPOINT_FOLDER}(/step-\d{{8}}\.pt)?",
            rf"{CHECKPOINT_FOLDER}/(damaged-)?{CHECKPOINT}(-\d+)?(/[\w-]+\.pt|/manifest\.json|/SHA256SUMS)?",
            rf"{CHECKPOINT_FOLDER}/\.(saving|replaced|removed)-[\w.-]+(/[\w.-]+)?",
            r"tensorboard(/events\.out\.tfevents\.[\w.-]+)?",
            r"profile(/rank\d+\.json\.gz)?",
        )
    )
)


def is_written_by_a_run(path: str) -> bool:
    """Whether a run writes a file or folder of this name.

    :param path: relative to the run's directory
    """
    name = path.rpartition("/")[2]
    return _WRITTEN.fullmatch(path) is not None or SCRATCH.fullmatch(name) is not None


def require_only_a_run(folder: Path) -> None:
    """A link is refused too, since what it points to is elsewhere.

    :raises UsageError: when the directory holds something that no run has written
    """
    entries = {entry.relative_to(folder).as_posix(): entry for entry in sorted(folder.rglob("*"))}
    if foreign := [path for path, entry in entries.items() if entry.is_symlink() or not is_written_by_a_run(path)]:
        more = f" and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
        raise UsageError(
            f"--overwrite: {folder} also holds {', '.join(foreign[:MOST_NAMED])}{more}, which no run has written: move "
            "that away, or give another --run-dir"
        )


def lock_run(folder: Path) -> TextIO:
    """Lock a directory until the returned file is closed, or this process ends: a second run in it is refused until then.

    A POSIX record lock belongs to a process. The kernel releases it however the process ends, SIGKILL included. Loader
    workers do not inherit it, so a worker that outlives its rank for a moment does not keep the lock. (``flock`` belongs to
    the open file, which a fork shares.) Shared file systems enforce the lock on other hosts, if they support locks; if not,
    a warning says so.

    :raises UsageError: naming the process that holds the lock
    """
    file = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115 (open as long as the lock is held)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise UsageError(
                f"--run-dir {folder} is in use by {holder}: wait for it or stop it, or give another directory"
            ) from error
        logger.warning(f"{folder} cannot be locked ({error.strerror}): a second run in it is not refused")
    file.truncate(0)
    file.write(_this_process())
    file.flush()
    return file


def require_lock(folder: Path) -> None:
    """Check that this process still holds the lock of its directory, before it writes there.

    :raises UsageError: when the lock file was removed or is another process's: another run may write into the directory
    """
    try:
        holder = (folder / LOCK_FILE).read_text(errors="replace")
    except OSError:
        holder = "no process\n"
    if holder != _this_process():
        raise UsageError(
            f"{folder / LOCK_FILE} is no longer this run's but that of {holder.strip()}: it was removed, or another run was "
            "started here; nothing more is saved, so that no other run's files are overwritten"
        )


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}\n"


def prepare(folder: Path, *, overwrite: bool, resume: bool = False, resumable: bool = True) -> TextIO:
    """Create a run's directory, or accept the one to resume. For rank 0, before anything is written.

    :param overwrite: not together with ``resume``, which the command's settings refuse
    :param resumable: whether the command has a flag ``--resume`` that an error message may name
    :returns: the lock on the directory, to be held as long as the run lasts
    :raises UsageError: when it exists (without ``resume`` or ``overwrite``), is not a run's, has nothing to resume, is in
        use, or cannot be written
    """
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
        if exists and overwrite:
            require_only_a_run(folder)
        require_writable(folder)
        lock = lock_run(folder)
        if exists and overwrite:
            # The folder itself stays: it may be a link, or the current directory of a shell. config.json goes last: if we
            # are killed before, the folder is still known as a run's.
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
    """Create the directory on this node if it does not exist, and check that it can be written.

    :raises UsageError: when it cannot be written
    """
    try:
        (folder / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
        _try_writing(folder)
    except OSError as error:
        raise UsageError(f"--run-dir {folder} cannot be written: {error}") from error


def holds_run(folder: Path) -> bool:
    """Whether the folder's ``config.json`` is one of ours, or if that is missing or damaged, whether there are checkpoints."""
    checkpoints = folder.glob(f"{CHECKPOINT_FOLDER}/*/manifest.json")
    return has_config(folder) or (
        not read_config(folder) and any(re.fullmatch(CHECKPOINT, file.parent.name) for file in checkpoints)
    )


def has_config(folder: Path) -> bool:
    """Whether the folder's ``config.json`` is one of ours; many programs write a file of that name."""
    return "dataset_fingerprint" in read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``. Empty when it is missing or damaged."""
    try:
        content = json.loads((folder / CONFIG_FILE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


CONTINUE = "continue with --resume"


@contextlib.contextmanager
def writing(path: Path, remedy: str = CONTINUE) -> Iterator[None]:
    """A block that writes a part of a run.

    :param remedy: what a user does after the disk can be written again
    :raises UsageError: naming ``path``, for an OSError in the block
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): {'make room' if full else 'remove the cause'}, then {remedy}"
        ) from error


def files_line(output: Path, files: Sequence[str], traces: bool = False) -> str:
    """The last line of a summary: it names the files, and what opens the traces among them."""
    opened = " (traces open at https://ui.perfetto.dev)" if traces else ""
    return f"results in {output}: {', '.join(files)}{opened}"


@contextlib.contextmanager
def results_in(folder: Path) -> Iterator[None]:
    """A block that writes a benchmark's results.

    :raises UsageError: for an OSError in the block
    """
    try:
        yield
    except FileExistsError as error:
        raise UsageError(f"--output {folder} is a file: give a folder") from error
    except OSError as error:
        raise UsageError(f"--output {folder} cannot be written: {error.strerror or error}") from error


def prepare_output(folder: Path) -> None:
    """Create a benchmark's folder and check that it can be written, before the benchmark runs for hours.

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
    """Whether the entry may be written before ``config.json``, so that a run killed that early leaves it."""
    return name in (LOCK_FILE, LOG_FOLDER, LAUNCH_FILE) or SCRATCH.fullmatch(name) is not None
