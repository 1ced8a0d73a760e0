"""The choice of a run's checkpoint: the newest that is whole, the best, or one by its name."""

from __future__ import annotations

from pathlib import Path

from common.errors import UsageError
from common.files.run_directory import CONFIG_FILE
from ddp.checkpoint import storage
from ddp.checkpoint.storage import Manifest

BEST = "best"
CHOICE = f"name of one, or {BEST} (default: the newest that is whole)"


def choose(run_dir: Path, name: str | None) -> tuple[Path, Manifest]:
    """The path and manifest of a checkpoint whose every byte was checked.

    :param name: its name, :data:`BEST`, or None for the newest that is whole
    :raises UsageError: when there is no such checkpoint, or it is damaged
    """
    paths = existing(run_dir)
    if name is None or name == BEST:
        found = storage.newest(run_dir)
        assert found is not None  # because there are paths
        if name is None:
            return found
        name = best_of(found[1])
        if name is None:
            raise UsageError(f"--checkpoint {BEST}: the run has evaluated none yet; leave it out to take the newest")
    path = named(name, paths)
    return path, storage.verify(path)


def existing(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, oldest first, whole or damaged.

    :raises UsageError: when there is none
    """
    paths = storage.all_of(run_dir)
    if not paths:
        found = "no checkpoint yet" if (run_dir / CONFIG_FILE).is_file() else "no run"
        raise UsageError(f"--run-dir {run_dir} holds {found}: name the directory of a run that has written one")
    return paths


def named(name: str, paths: list[Path]) -> Path:
    """:raises UsageError: when none has this name"""
    for path in paths:
        if path.name == name:
            return path
    raise UsageError(f"--checkpoint {name}: there is only {', '.join(path.name for path in paths)}")


def best_of(manifest: Manifest) -> str | None:
    """Name of the checkpoint that was the best of its run when this one was written."""
    best = manifest.progress.get("best")
    return best["name"] if best else None
