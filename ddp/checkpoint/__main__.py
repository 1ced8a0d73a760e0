"""Inspect a run's checkpoints, and export the weights of one.

    python -m ddp.checkpoint inspect --run-dir runs/glyphs-fashion-cnn
    python -m ddp.checkpoint export --run-dir runs/glyphs-fashion-cnn --checkpoint best --output weights.pt

``inspect`` reads every byte and lists them; it ends with status 1 if any is damaged. The data, versions and settings of each are in
its ``manifest.json``. ``sha256sum -c SHA256SUMS`` in a checkpoint's folder reads them, too. ``export`` writes a
state dict for the plain module of common/models/build.py, which ``torch.load(weights_only=True)`` reads.
Neither changes anything in the run's directory. If the run is still going on and removes a checkpoint while it is read,
that one is reported as damaged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.command_line.cli import command, option, parse
from common.distributed.dist_env import DistEnv, require_alone
from common.distributed.rank_logging import rank_logging
from common.errors import UsageError
from common.files.atomic_files import atomic_file
from ddp.checkpoint import storage
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
    output: Path = option(Path("weights.pt"), "file that the weights are written to")
    overwrite: bool = option(False, "replace that file")


WITHOUT_DCP = (
    "checkpoints are not exchanged with torch.distributed.checkpoint any more: export the weights, and use torch_save_to_dcp and "
    "dcp_to_torch_save of torch.distributed.checkpoint.format_utils"
)


@command
def main() -> None:
    name, *arguments = sys.argv[1:] or ["--help"]
    require_alone("ddp.checkpoint")
    if name == "import" or any(argument.startswith("--format") for argument in arguments):
        raise UsageError(WITHOUT_DCP)
    if name in ("-h", "--help"):
        print(f"{__doc__}\ncommands: {', '.join(COMMANDS)} (NAME --help lists its options)")
    elif name in COMMANDS:
        with rank_logging(DistEnv.alone(torch.device("cpu"))):
            COMMANDS[name](arguments)
    else:
        raise UsageError(f"unknown command {name!r}: there is {', '.join(COMMANDS)}")


def inspect(argv: Sequence[str]) -> None:
    """Print a table of all checkpoints; exit status 1 if any is damaged."""
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
    if len(whole) < len(paths):
        sys.exit(1)


def export(argv: Sequence[str]) -> None:
    """Write the weights of one checkpoint, on the CPU; the output is complete or absent.

    :raises UsageError: when there is no such checkpoint, it is damaged, or the output is there or cannot be written
    """
    config = parse(ExportConfig, "ddp.checkpoint export", __doc__, argv)
    output = config.output
    try:
        if os.path.lexists(output) and not (config.overwrite and output.is_file() and not output.is_symlink()):
            raise UsageError(
                f"--output {output} is there already: give another name (--overwrite replaces a regular file only)"
            )
        path, manifest = choose(config.run_dir, config.checkpoint)
        weights = storage.read(path, "model")
        with atomic_file(output) as file:
            save_tensors(file, weights)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written ({error.strerror})") from error
    print(f"{output}: {len(weights)} tensors of {manifest.config['model']}, from {manifest.name}")


COMMANDS = {"inspect": inspect, "export": export}


def _verified(path: Path) -> Manifest | Damaged:
    try:
        return storage.verify(path)
    except Damaged as error:
        return error


if __name__ == "__main__":
    main()
