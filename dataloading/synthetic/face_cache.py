"""The drawn faces (:mod:`dataloading.synthetic.faces`) as a folder of files, drawn once into the user's cache directory.

A folder is complete or absent: it is written beside its place, under a hidden name, and renamed as a whole. If several
processes start at once, the first to rename wins, and the others use its folder.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from common.errors import UsageError
from dataloading.synthetic.people import IDENTITIES, images_of, name_of

TITLE = "drawn faces"
_NAME = "faces-v1"  # the number changes with the drawing, so that old files are not taken for new ones
_ABANDONED_AFTER_S = 3600
_KB_PER_IMAGE, _KB_PER_PERSON = 12, 4  # three blocks of a usual file system, and one for the folder


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/raw-ddp/faces-v1``; ``~/.cache`` replaces a variable that is no absolute path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path(os.path.expanduser("~"), ".cache")) / "raw-ddp" / _NAME


def ensure(folder: Path | None = None, *, people: int = IDENTITIES) -> Path:
    """The folder with the faces, drawn now if it is missing: ``<folder>/First_Last/First_Last_0001.jpg``.

    :param folder: when None, :func:`default_folder`, or a folder beside it for a part of the people
    :param people: draw the first so many, which have the most images
    :raises UsageError: if it cannot be written; no partial folder stays
    """
    if not 1 <= people <= IDENTITIES:
        raise ValueError(f"people {people} is not in 1 ... {IDENTITIES}")
    if folder is None:
        folder = default_folder() if people == IDENTITIES else default_folder().with_name(f"{_NAME}-first-{people}")
    try:
        if not _is_complete(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder)
            _draw_into_place(folder, people)
    except OSError as error:
        megabytes = -(-(_KB_PER_IMAGE * sum(map(images_of, range(people))) + _KB_PER_PERSON * people) // 1000)
        raise UsageError(
            f"cannot write the drawn faces to {folder}: {error.strerror or error} (they need {megabytes} MB); set "
            "XDG_CACHE_HOME to another place, or give a folder of your own with --path-to-folder or --data-dir"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    """An empty folder counts as absent, since a rename may replace it; a file raises :exc:`NotADirectoryError`."""
    return folder.exists() and any(folder.iterdir())


def _remove_abandoned(folder: Path) -> None:
    """Delete the scratch folders of processes that were killed."""
    for path in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def _draw_into_place(folder: Path, people: int) -> None:
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        # One level further down, since the scratch folder itself is closed to other users.
        _write(Path(scratch, folder.name), people, folder)
        try:
            os.rename(Path(scratch, folder.name), folder)
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
        for identity in range(people):
            name = name_of(identity)
            (root / name).mkdir(parents=True)
            for image in range(images_of(identity)):
                (root / name / f"{name}_{image + 1:04d}.jpg").write_bytes(faces.encode(faces.draw(identity, image)))
                bar.update()
