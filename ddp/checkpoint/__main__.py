"""Inspect a run's checkpoints, verify them, and export the weights of one.

    python -m ddp.checkpoint inspect --run-dir runs/glyphs-fashion-cnn
    python -m ddp.checkpoint verify --run-dir runs/glyphs-fashion-cnn
    python -m ddp.checkpoint export --run-dir runs/glyphs-fashion-cnn --checkpoint best --output weights.pt

``inspect`` lists them, with all facts of the newest that is whole. ``verify`` reads every byte and ends with status 1 if any
is damaged; ``sha256sum -c SHA256SUMS`` in a checkpoint's folder does the same. ``export`` writes a state dict for the plain
module of common/training/models.py, which ``torch.load(weights_only=True)`` reads. None of them changes anything in the run's
directory. If the run is still going on and removes a checkpoint while it is read, that one is reported as damaged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cli import command, option, parse
from common.distributed.process_group import DistEnv, require_alone
from common.distributed.rank_logging import rank_logging
from common.errors import UsageError
from common.files.atomic_files import atomic_file
from ddp.checkpoint import storage
from ddp.checkpoint.choice import CHOICE, best_of, choose, existing, named
from ddp.checkpoint.folder import Damaged, save_tensors
from ddp.checkpoint.storage import Manifest

DEFAULT_RUN = Path("runs/glyphs-fashion-cnn")


@dataclass(frozen=True)
class InspectConfig:
    """Settings of ``ddp.checkpoint inspect``."""

    run_dir: Path = option(DEFAULT_RUN, "directory of the run")


@dataclass(frozen=True)
class VerifyConfig:
    """Settings of ``ddp.checkpoint verify``."""

    run_dir: Path = option(DEFAULT_RUN, "directory of the run")
    checkpoint: str | None = option(None, "name of the checkpoint to check (default: all)")


@dataclass(frozen=True)
class ExportConfig:
    """Settings of ``ddp.checkpoint export``."""

    run_dir: Path = option(DEFAULT_RUN, "directory of the run")
    checkpoint: str | None = option(None, CHOICE)
    output: Path = option(Path("weights.pt"), "file that the weights are written to")
    overwrite: bool = option(False, "replace that file")


@command
def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    require_alone("ddp.checkpoint")
    if name in ("-h", "--help"):
        print(f"{__doc__}\ncommands: {', '.join(COMMANDS)} (NAME --help lists its options)")
    elif name in COMMANDS:
        with rank_logging(DistEnv.alone(torch.device("cpu"))):
            COMMANDS[name](arguments)
    else:
        raise UsageError(f"unknown command {name!r}: there is {', '.join(COMMANDS)}")


def inspect(argv: Sequence[str]) -> None:
    """Print a table of all checkpoints, and all facts of the newest that is whole."""
    config = parse(InspectConfig, "ddp.checkpoint inspect", __doc__, argv)
    found = [_verified(path) for path in existing(config.run_dir)]
    whole = [one for one in found if isinstance(one, Manifest)]
    best = best_of(whole[-1]) if whole else None
    width = max(len(one.path.name if isinstance(one, Damaged) else one.name) for one in found)
    print(f"{'':<{width}}{'step':>9}{'epoch':>7}{'step in epoch':>15}{'accuracy':>10}{'size':>12}{'ranks':>7}")
    for one in found:
        if isinstance(one, Damaged):
            print(f"{one.path.name:<{width}}  damaged: {one.problem}")
            continue
        accuracy = one.progress.get("accuracy")
        print(
            f"{one.name:<{width}}{one.step:>9}{one.epoch:>7}{one.step_in_epoch:>15}"
            f"{'' if accuracy is None else f'{100 * accuracy:.2f} %':>10}{_size(one):>12}{one.world_size:>7}  whole"
            f"{', best' if one.name == best else ''}"
        )
    if whole:
        print(f"\n{whole[-1].name}, the newest that is whole:")
        facts = {"step": whole[-1].step, **whole[-1].facts()}
        print("\n".join(f"  {name:<20} {_text(fact)}" for name, fact in facts.items()))


def verify(argv: Sequence[str]) -> None:
    """Print a line for each checkpoint; exit status 1 if any is damaged."""
    config = parse(VerifyConfig, "ddp.checkpoint verify", __doc__, argv)
    paths = existing(config.run_dir)
    damaged = False
    for path in paths if config.checkpoint is None else [named(config.checkpoint, paths)]:
        found = _verified(path)
        if isinstance(found, Damaged):
            damaged = True
            print(f"{path.name}: damaged: {found.problem}")
        else:
            print(f"{path.name}: whole, {_size(found)}")
    if damaged:
        sys.exit(1)


def export(argv: Sequence[str]) -> None:
    """Write the weights of one checkpoint, on the CPU; the file is complete or absent.

    :raises UsageError: when there is no such checkpoint, it is damaged, or the file is there or cannot be written
    """
    config = parse(ExportConfig, "ddp.checkpoint export", __doc__, argv)
    output = config.output
    try:
        _require_file(output, config.overwrite)
        path, manifest = choose(config.run_dir, config.checkpoint)
        weights = storage.read(path, "model")
        with atomic_file(output) as file:
            save_tensors(file, weights)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written ({error.strerror})") from error
    print(f"{output}: {len(weights)} tensors of {manifest.model}, from {manifest.name}")


def _require_file(output: Path, overwrite: bool) -> None:
    """:raises UsageError: when this is something else than a file that is not there, or one that may be replaced"""
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder: name a file")
    if output.is_symlink() or (output.exists() and not output.is_file()):
        raise UsageError(f"--output {output} is a link or a device: name a regular file")
    if os.path.lexists(output) and not overwrite:
        raise UsageError(f"--output {output} is there already: give --overwrite to replace it, or another name")


COMMANDS = {"inspect": inspect, "verify": verify, "export": export}


def _verified(path: Path) -> Manifest | Damaged:
    try:
        return storage.verify(path)
    except Damaged as error:
        return error


def _size(manifest: Manifest) -> str:
    return f"{sum(manifest.files.values()) / 1e6:,.3f} MB"


def _text(value: object) -> str:
    """A fact as one line."""
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    main()
