"""What a run writes into its directory: only that is deleted, and nothing else is read or written through."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from common.errors import UsageError
from common.files.atomic_files import SCRATCH

CONFIG_FILE = "config.json"
LOG_FOLDER = "logs"
FLIGHT_RECORDER_FOLDER = "flight-recorder"  # among the logs; see common/resilience/flight_recorder.py
LOCK_FILE = "lock"
LAUNCH_FILE = "launch.json"  # the torchrun agents that have started this run; see ddp/resilience/restarts.py
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


def foreign_entries(folder: Path) -> list[str]:
    """What no run has written in its directory, and so must not be deleted: paths relative to it, sorted.

    A link is foreign too, since what it points to is elsewhere.
    """
    return sorted(path for path, entry in _walk(folder, "") if not is_written_by_a_run(path) or entry.is_symlink())


def require_only_a_run(folder: Path) -> None:
    """:raises UsageError: when the directory holds something that no run has written"""
    if foreign := foreign_entries(folder):
        more = f" and {len(foreign) - MOST_NAMED} more" if len(foreign) > MOST_NAMED else ""
        raise UsageError(
            f"--overwrite: {folder} also holds {', '.join(foreign[:MOST_NAMED])}{more}, which no run has written: move "
            "that away, or give another --run-dir"
        )


def require_regular_files(folder: Path) -> None:
    """A pipe in place of a file would make a reader wait forever, and a device would take what is written.

    :raises UsageError: naming the first of a run's files that is something else. (Checkpoints are verified when they are read.)
    """
    for path in (*(folder / name for name in FILES), *(folder / LOG_FOLDER).glob("*")):
        if path.is_dir() and not path.is_symlink():
            if path.parent == folder:  # there may be folders among the logs: torchrun's --log-dir
                raise UsageError(f"{path} is a folder: move it away, or give another --run-dir")
        elif path.exists() and not path.is_file():
            raise UsageError(f"{path} is no regular file: remove it, or give another --run-dir")


def read_regular(path: Path) -> bytes:
    """The content of a file.

    :raises OSError: when it cannot be read, or is no regular file: a pipe would make the reader wait forever
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _walk(folder: Path, inside: str) -> Iterator[tuple[str, Path]]:
    """All entries below a folder, those of a folder after it; folders behind links are not entered."""
    for entry in sorted(folder.iterdir()):
        path = f"{inside}{entry.name}"
        yield path, entry
        if entry.is_dir() and not entry.is_symlink():
            yield from _walk(entry, f"{path}/")
