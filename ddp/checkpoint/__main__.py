"""What a run's checkpoints are, whether they are whole, and the weights of one of them alone.

    python -m ddp.checkpoint inspect --run-dir runs/glyphs-fashion-cnn
    python -m ddp.checkpoint verify --run-dir runs/glyphs-fashion-cnn
    python -m ddp.checkpoint export --run-dir runs/glyphs-fashion-cnn --checkpoint best --output weights.pt

``inspect`` lists them and tells what the newest whole one says of itself; ``verify`` reads every byte and ends with status 1
if any is damaged; ``export`` writes a state dict that ``torch.load(weights_only=True)`` reads into the plain module of
common/training/models.py. None of them changes anything in the run's directory. While the run goes on, a checkpoint that it removes
in the middle of being read is told as damaged, and is gone the next time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from common.cli import command, option, parse
from common.distributed.process_group import DistEnv, require_alone
from common.distributed.rank_logging import rank_logging
from common.errors import UsageError
from ddp.checkpoint import storage
from ddp.checkpoint.choice import CHOICE, best_of, choose, existing, named
from ddp.checkpoint.manifest import Damaged, Manifest

DEFAULT_RUN = Path("runs/glyphs-fashion-cnn")


@dataclass(frozen=True)
class InspectConfig:
    """Settings of ``ddp.checkpoint inspect``."""

    run_dir: Path = option(DEFAULT_RUN, "directory of the run")


@dataclass(frozen=True)
class VerifyConfig:
    """Settings of ``ddp.checkpoint verify``."""

    run_dir: Path = option(DEFAULT_RUN, "directory of the run")
    checkpoint: str | None = option(None, "name of the one to check (default: all)")


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
    """Print a table of all checkpoints, and what the newest whole one says of itself."""
    config = parse(InspectConfig, "ddp.checkpoint inspect", __doc__, argv)
    found = [_verified(path) for path in existing(config.run_dir)]
    whole = [one for one in found if isinstance(one, Manifest)]
    best = best_of(whole[-1]) if whole else None
    width = max(len(one.path.name if isinstance(one, Damaged) else one.name) for one in found)
    print(f"{'':<{width}}{'step':>9}{'epoch':>7}{'position':>10}{'accuracy':>10}{'size':>12}{'ranks':>7}")
    for one in found:
        if isinstance(one, Damaged):
            print(f"{one.path.name:<{width}}  damaged: {one.problem}")
            continue
        accuracy = one.progress.get("accuracy")
        print(
            f"{one.name:<{width}}{one.step:>9}{one.epoch:>7}{one.position:>10}"
            f"{'' if accuracy is None else f'{100 * accuracy:.2f} %':>10}{_size(one):>12}{one.world_size:>7}  whole"
            f"{', best' if one.name == best else ''}"
        )
    if whole:
        print(f"\n{whole[-1].name}, the newest that is whole:")
        facts = vars(whole[-1]).items()
        print("\n".join(f"  {name:<20} {_text(fact)}" for name, fact in facts if name not in ("files", "format")))


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
    """Write the weights of one checkpoint, alone and on the CPU, whole or not at all.

    :raises UsageError: when there is no such checkpoint, it is damaged, or the file is there or cannot be written
    """
    config = parse(ExportConfig, "ddp.checkpoint export", __doc__, argv)
    output = config.output
    if output.is_dir():
        raise UsageError(f"--output {output} is a folder: name a file")
    if os.path.lexists(output) and not config.overwrite:
        raise UsageError(f"--output {output} is there already: give --overwrite to replace it, or another name")
    path, manifest = choose(config.run_dir, config.checkpoint)
    weights = storage.read(path, "model")
    scratch = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    try:
        storage.save_file(scratch, weights)
        os.replace(scratch, output)
    except OSError as error:
        raise UsageError(f"--output {output} cannot be written ({error.strerror})") from error
    finally:
        with contextlib.suppress(OSError):
            scratch.unlink()
    print(f"{output}: {len(weights)} tensors of {manifest.model}, from {manifest.name}")


COMMANDS = {"inspect": inspect, "verify": verify, "export": export}


def _verified(path: Path) -> Manifest | Damaged:
    try:
        return storage.verify(path)
    except Damaged as error:
        return error


def _size(manifest: Manifest) -> str:
    return f"{sum(facts['bytes'] for facts in manifest.files.values()) / 1e6:,.3f} MB"


def _text(value: object) -> str:
    """A fact on one line."""
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    main()
