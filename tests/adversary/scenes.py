"""The surroundings of attempts: a finished run, photos, damage."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tests.dataloading.faults import write_people
from tests.support.ranks import run_forked

TRAIN = "ddp.train --device cpu --threads 1 --train-samples 144 --test-samples 16 --batch-size 48 --epochs 1"
RUN = f"{TRAIN} --run-dir {{here}}/run"  # trains in the attempt's folder
RESUME = f"{TRAIN} --run-dir {{run}} --epochs 2 --resume"  # continues a copy of the finished run
BEFORE_A_RUN = ("run/lock", "run/launch.json", "run/logs/*")  # what a refused start may leave: the next one begins anew
EVALUATE = "ddp.evaluate --device cpu --run-dir {run} --test-samples 16"


def _kept_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="adversary-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def finished_run() -> Path:
    """The directory of a finished run of one epoch, made once; attempts harm copies of it."""
    folder = _kept_folder() / "run"
    (done,) = run_forked(*TRAIN.split(), "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder


def finished_copy(folder: Path) -> Path:
    """A copy of that directory in ``folder/run``."""
    return shutil.copytree(finished_run(), folder / "run", symlinks=True)


@functools.cache
def photos() -> Path:
    """A folder of 24 photos of four people, in the layout of Labeled Faces in the Wild, made once."""
    return write_people(_kept_folder() / "faces", {f"Person_{person}": 6 for person in range(4)})
