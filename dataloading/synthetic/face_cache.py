"""The embedded faces (:mod:`dataloading.synthetic.faces`) as a folder of files: drawn once, into the user's cache directory.

A folder is complete or absent: it is written beside its place, under a hidden name, and renamed as a whole. So processes
that begin at once do each other no harm: the first to rename wins, and the others take its folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from common.errors import UsageError
from dataloading.synthetic.faces import draw, encode
from dataloading.synthetic.people import IDENTITIES, images_of, name_of

# The number changes whenever the drawing does, so that an older version's faces are not taken for these.
_NAME = "faces-v1"
TITLE = "drawn faces"
_ABANDONED_AFTER_S = 3600
# A face takes three of a file system's usual blocks, and a person's folder one.
_KB_PER_IMAGE = 12
_KB_PER_PERSON = 4


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/raw-ddp/faces-v1``, with ``~/.cache`` where the variable is not set to an absolute path."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path(os.path.expanduser("~")) / ".cache"
    return cache / "raw-ddp" / _NAME


def ensure(folder: Path | None = None, *, people: int = IDENTITIES) -> Path:
    """The folder with the faces, drawn now if they are not there: ``<folder>/First_Last/First_Last_0001.jpg``.

    :param folder: where; when None, :func:`default_folder`, or one beside it if only some of the people are wanted
    :param people: the first so many, which are those with the most images
    :raises UsageError: if it cannot be written; nothing is left then
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
        images = sum(map(images_of, range(people)))
        megabytes = -(-(_KB_PER_IMAGE * images + _KB_PER_PERSON * people) // 1000)
        raise UsageError(
            f"cannot write the embedded faces to {folder}: {error.strerror or error} (they need {megabytes} MB); point "
            "XDG_CACHE_HOME to another place, or give a folder of your own with --path-to-folder or --data-dir"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    """An empty folder counts as absent: a rename may replace it.

    :raises NotADirectoryError: if there is something else
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    return folder.is_dir() and any(folder.iterdir())


def _scratch_prefix(folder: Path) -> str:
    return f".{folder.name}."


def _remove_abandoned(folder: Path) -> None:
    """What a process that was killed left behind."""
    for path in folder.parent.iterdir():
        if path.name.startswith(_scratch_prefix(folder)):
            try:
                age_s = time.time() - path.stat().st_mtime
            except FileNotFoundError:
                # another process has just finished with it
                continue
            if age_s > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def _draw_into_place(folder: Path, people: int) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(folder), dir=folder.parent))
    try:
        # one level further down, for mkdtemp's folder is closed to everybody else
        _write(scratch / folder.name, people, folder)
        try:
            os.rename(scratch / folder.name, folder)
        except OSError:
            if not _is_complete(folder):  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write(root: Path, people: int, folder: Path) -> None:
    """Draw into ``root`` what will be ``folder``."""
    total = sum(map(images_of, range(people)))
    terminal = sys.stderr.isatty()
    if not terminal:
        print(f"drawing {total:,} faces into {folder} (once, some 15 s)", file=sys.stderr, flush=True)
    with tqdm(total=total, desc=f"drawing faces into {folder} (once)", unit="face", disable=not terminal) as bar:
        for identity in range(people):
            name = name_of(identity)
            (root / name).mkdir(parents=True)
            for image in range(images_of(identity)):
                (root / name / f"{name}_{image + 1:04d}.jpg").write_bytes(encode(draw(identity, image)))
                bar.update()
