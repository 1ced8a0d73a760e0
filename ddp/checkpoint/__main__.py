"""Inspect a run's checkpoints, export the weights of one, and exchange them with torch.distributed.checkpoint.

    python -m ddp.checkpoint inspect --run-dir runs/glyphs-fashion-cnn
    python -m ddp.checkpoint export --run-dir runs/glyphs-fashion-cnn --checkpoint best --output weights.pt
    python -m ddp.checkpoint export --run-dir runs/glyphs-fashion-cnn --format dcp --output for-dcp
    python -m ddp.checkpoint import --input from-dcp --run-dir runs/glyphs-fashion-cnn --output runs/imported

``inspect`` reads every byte and lists them, with the data, versions and settings of the newest that is whole; it ends with status 1
if any is damaged. ``sha256sum -c SHA256SUMS`` in a checkpoint's folder reads them, too. ``export`` writes a
state dict for the plain module of common/training/models.py, which ``torch.load(weights_only=True)`` reads, or in DCP's
format a folder with the weights and the optimizer's state. ``import`` writes a new run whose only checkpoint has the tensors
of a folder of DCP, and all else of the run's: ``ddp.train --run-dir runs/imported --resume`` continues it. DCP's index is a
pickle: import only what you trust.
None of them changes anything in the run's directory. If the run is still going on and removes a checkpoint while it is read,
that one is reported as damaged.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cli import command, flag_of, option, parse
from common.distributed.process_group import DistEnv, require_alone
from common.distributed.rank_logging import rank_logging
from common.errors import UsageError
from common.files.atomic_files import atomic_file
from common.files.run_directory import CONFIG_FILE
from ddp.checkpoint import storage
from ddp.checkpoint.directory import move_into_place, scratch_in
from ddp.checkpoint.folder import Damaged, save_tensors
from ddp.checkpoint.storage import CHOICE, Manifest, choose, existing


@dataclass(frozen=True)
class InspectConfig:
    """Settings of ``ddp.checkpoint inspect``."""

    run_dir: Path = option(Path("runs/glyphs-fashion-cnn"), "directory of the run")


@dataclass(frozen=True)
class ExportConfig(InspectConfig):
    """Settings of ``ddp.checkpoint export``."""

    checkpoint: str | None = option(None, CHOICE)
    format: str = option(
        "torch", "torch: weights alone; dcp: of torch.distributed.checkpoint", choices=("torch", "dcp")
    )
    output: Path = option(
        Path("weights.pt"), "file that the weights are written to; of dcp, a folder that is not there yet"
    )
    overwrite: bool = option(False, "replace that file")


@dataclass(frozen=True)
class ImportConfig(InspectConfig):
    """Settings of ``ddp.checkpoint import``, whose run is one of the same model."""

    input: Path = option(Path("from-dcp"), "folder that torch.distributed.checkpoint has written")
    checkpoint: str | None = option(None, f"whose facts are taken: {CHOICE}")
    output: Path = option(Path("runs/imported"), "directory of the new run")


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
    """Print a table of all checkpoints, and the data, versions and settings of the newest that is whole; exit status 1 if any is
    damaged."""
    config = parse(InspectConfig, "ddp.checkpoint inspect", __doc__, argv)
    paths = existing(config.run_dir)
    checked = [_verified(path) for path in paths]
    whole = [one for one in checked if isinstance(one, Manifest)]
    width = max(len(path.name) for path in paths)
    print(f"{'':<{width}}{'step':>9}{'epoch':>7}{'step in epoch':>15}{'accuracy':>10}{'size':>12}{'ranks':>7}")
    for path, one in zip(paths, checked, strict=True):
        if isinstance(one, Damaged):
            print(f"{path.name:<{width}}  damaged: {one.problem}")
            continue
        accuracy = one.progress["accuracy"]
        size = f"{sum(file.stat().st_size for file in path.iterdir()) / 1e6:,.3f} MB"
        print(
            f"{path.name:<{width}}{one.step:>9}{one.epoch:>7}{one.step_in_epoch:>15}"
            f"{'' if accuracy is None else f'{100 * accuracy:.2f} %':>10}{size:>12}{one.world_size:>7}  whole"
            f"{', best' if path.name == whole[-1].best else ''}"
        )
    if whole:
        one = whole[-1]
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        settings = " ".join(
            f"{flag_of(name)}={value}" for name, value in one.config.items() if value not in (None, False)
        )
        print(f"\n{one.name}, the newest that is whole (all of its facts are in its manifest.json):")
        print(f"{one.dataset_length:,} training samples with digest {one.dataset_fingerprint}; {versions}")
        print(textwrap.fill(settings, 100, break_on_hyphens=False))
    if len(whole) < len(paths):
        sys.exit(1)


def export(argv: Sequence[str]) -> None:
    """Write the weights of one checkpoint, on the CPU; the output is complete or absent.

    :raises UsageError: when there is no such checkpoint, it is damaged, or the output is there or cannot be written
    """
    config = parse(ExportConfig, "ddp.checkpoint export", __doc__, argv)
    output = config.output
    try:
        _require_free(output, config.overwrite)
        path, manifest = choose(config.run_dir, config.checkpoint)
        if config.format == "dcp":
            from ddp.checkpoint.dcp import write_dcp  # imports much

            with scratch_in(output.parent) as scratch:
                count = write_dcp(path, scratch)
                move_into_place(scratch, output)
        else:
            weights = storage.read(path, "model")
            count = len(weights)
            with atomic_file(output) as file:
                save_tensors(file, weights)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written ({error.strerror})") from error
    print(f"{output}: {count} tensors of {manifest.config['model']}, from {manifest.name}")


def import_dcp(argv: Sequence[str]) -> None:
    """Write a new run with one checkpoint, whose tensors are those of a folder of DCP.

    :raises UsageError: when the folder does not fit the run's model, or the output is there or cannot be written
    """
    from ddp.checkpoint.dcp import read_dcp

    config = parse(ImportConfig, "ddp.checkpoint import", __doc__, argv)
    _require_free(config.output)
    path, manifest = choose(config.run_dir, config.checkpoint)
    written = storage.write(config.output, manifest, read_dcp(config.input, path))
    if (config.run_dir / CONFIG_FILE).is_file():
        shutil.copy(config.run_dir / CONFIG_FILE, config.output)
    print(f"{written}: the tensors of {config.input}, and all else of {manifest.name}")


def _require_free(output: Path, overwrite: bool = False) -> None:
    """:raises UsageError: when there is anything but a regular file that may be replaced"""
    if os.path.lexists(output) and not (overwrite and output.is_file() and not output.is_symlink()):
        raise UsageError(
            f"--output {output} is there already: give another name (export --overwrite replaces a regular file only)"
        )


COMMANDS = {"inspect": inspect, "export": export, "import": import_dcp}


def _verified(path: Path) -> Manifest | Damaged:
    try:
        return storage.verify(path)
    except Damaged as error:
        return error


if __name__ == "__main__":
    main()
