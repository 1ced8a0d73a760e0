"""The scripts, the cause that is planted in each, and the data that they read.

A planted line ends with :data:`MARK`. Where several lines of a script do, the right answer is any of them. :func:`copy_scripts`
leaves the marks out, so that no line tells what is wrong with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

# By where their causes lie; :func:`copy_scripts` puts all into one folder.
SCRIPTS = [Path(__file__).parent / "scripts" / folder for folder in ("loader", "dataset")]
MARK = "  # <- planted"


@dataclass(frozen=True)
class Case:
    """A script.

    :param command: its name, or ``-m`` and a module, as after ``dataloading.doctor --``
    :param cause: the short name of its planted cause; empty if it is fast, and nothing should be said
    :param needs: a package that may be missing
    """

    command: str
    cause: str = ""
    needs: str = "torch"

    @property
    def name(self) -> str:
        return self.command.removeprefix("-m ").partition(".")[0]

    def planted_lines(self) -> set[str]:
        """``file:line`` of each planted line, the file as :func:`copy_scripts` names it."""
        return {
            f"{file.relative_to(folder)}:{number}"
            for folder in SCRIPTS
            for file in [*folder.glob(f"{self.name}.py"), *folder.glob(f"{self.name}/*.py")]
            for number, line in enumerate(file.read_text().splitlines(), 1)
            if MARK in line
        }


CASES = (
    Case("slow_samples.py", "slow-samples"),
    Case("restarted_workers.py", "workers-restarted"),
    Case("too_many_threads.py", "too-many-threads"),
    Case("floats_for_bytes.py", "floats-for-bytes"),
    Case("python_list.py", "python-list-copied"),
    Case("spawned_annotations.py", "dataset-pickled"),
    Case("tensor_by_sample.py", "tensor-by-sample"),
    Case("shared_database.py", "shared-handle"),
    Case("growing_cache.py", "growing-workers"),
    Case("json_per_sample.py", "slow-getitem"),
    Case("full_size_photos.py", "slow-getitem"),
    Case("pixel_loop.py", "slow-getitem"),
    Case("remote_files.py", "slow-getitem"),
    Case("-m textproject.train", "slow-collate"),
    Case("no_workers.py", "too-few-workers"),
    Case("accelerate_loop.py", "slow-getitem", needs="accelerate"),
    Case("lightning_loop.py", "too-few-workers", needs="lightning"),
    Case("fast_vectors.py"),
    Case("fast_photos.py"),
)


def copy_scripts(folder: Path) -> None:
    """Copy all scripts into one folder, without the marks."""
    for scripts in SCRIPTS:
        shutil.copytree(scripts, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for file in folder.rglob("*.py"):
        file.write_text(file.read_text().replace(MARK, ""))


def make_data(folder: Path) -> None:
    """Make the data that the scripts read from the folder in which they run."""
    _draw_images(folder / "small", (256, 256), 3000)
    _draw_images(folder / "photos", (1600, 1200), 240)
    files = sorted((folder / "small").glob("*/*.jpg"))
    labels = {file.name: {"label": number % 10, "tags": ["outdoor", "daylight"]} for number, file in enumerate(files)}
    (folder / "labels.json").write_text(json.dumps(labels))
    with sqlite3.connect(folder / "tiles.db") as db:
        db.execute("CREATE TABLE tiles (id INTEGER PRIMARY KEY, data BLOB, label INTEGER)")
        rows = ((number, file.read_bytes(), number % 10) for number, file in enumerate(files))
        db.executemany("INSERT INTO tiles VALUES (?, ?, ?)", rows)


def _draw_images(folder: Path, size: tuple[int, int], count: int) -> None:
    """Draw a dozen JPEGs, and link them under many names in two classes."""
    rng = np.random.default_rng(0)
    drawn = [folder / ("cat", "dog")[number % 2] / f"{number:05}.jpg" for number in range(12)]
    for number, file in enumerate(drawn):
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize(size).save(file)
        for copy in range(number + 12, count, 12):
            os.link(file, file.with_name(f"{copy:05}.jpg"))
