"""The drawn faces (:mod:`dataloading.synthetic.faces`) as a folder of files, drawn once into the user's cache directory.

A folder is complete or absent: it is written beside its place, under a hidden name, and renamed as a whole. If several
processes start at once, the first to rename wins, and the others use its folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from common.errors import UsageError

TITLE = "drawn faces"
PEOPLE = 1000
_NAME = "faces-v3"  # the number changes with the drawing, so that old files are not taken for new ones
_MEGABYTES = 54  # of a usual file system, in blocks of 4 kB


def name_of(person: int) -> str:
    return f"Person_{person:03d}"


def images_of(person: int) -> int:
    """The number of images of a person: at least 40 for each of the first 24, one or two for nine tenths of the others."""
    return max(1, int(0.5 + 40 * (53.4 / (person + 30)) ** 2.5))


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/raw-ddp/faces-v3``; ``~/.cache`` replaces a variable that is no absolute path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path(os.path.expanduser("~"), ".cache")) / "raw-ddp" / _NAME


def ensure(folder: Path | None = None, *, people: int = PEOPLE) -> Path:
    """The folder with the faces, drawn now if it is missing: ``<folder>/Person_000/Person_000_0001.jpg``.

    :param folder: when None, :func:`default_folder`
    :param people: draw the first so many, which have the most images
    :raises UsageError: if it cannot be written; no partial folder stays
    """
    folder = folder or default_folder()
    try:
        if not _is_complete(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(
                prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
            ) as scratch:
                # One level further down, since the scratch folder itself is closed to other users.
                _write(Path(scratch, folder.name), people, folder)
                _move(Path(scratch, folder.name), folder)
    except OSError as error:
        raise UsageError(
            f"cannot write the drawn faces to {folder}: {error.strerror or error} (they need {_MEGABYTES} MB); set "
            "XDG_CACHE_HOME to another place, or give a folder of your own with --path-to-folder or --data-dir"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    """An empty folder counts as absent, since a rename may replace it; a file raises :exc:`NotADirectoryError`."""
    return folder.exists() and any(folder.iterdir())


def _move(drawn: Path, folder: Path) -> None:
    try:
        os.rename(drawn, folder)
    except OSError:
        if not _is_complete(folder):  # otherwise another process was faster
            raise


def _write(root: Path, people: int, folder: Path) -> None:
    """Draw the content of ``folder`` into ``root``."""
    from dataloading.synthetic import faces  # with Pillow, only when it is needed

    total, terminal = sum(map(images_of, range(people))), sys.stderr.isatty()
    if not terminal:
        print(f"drawing {total:,} faces into {folder} (once, some 15 s)", file=sys.stderr, flush=True)
    with tqdm(total=total, desc=f"drawing faces into {folder} (once)", unit="face", disable=not terminal) as bar:
        for person in range(people):
            name = name_of(person)
            (root / name).mkdir(parents=True)
            for image in range(images_of(person)):
                (root / name / f"{name}_{image + 1:04d}.jpg").write_bytes(faces.encode(faces.draw(person, image)))
                bar.update()
