"""A folder with a folder of images per class, in any format that Pillow reads, resized to one size.

Folders within a class belong to it. Names that begin with a dot are left out, and so are files with an extension that Pillow
does not know.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from common.errors import UsageError
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.storage import LocalFolder, UniquePaths

LAYOUT = "DIR/CLASS/IMAGE, or DIR/train/CLASS/IMAGE and DIR/test/CLASS/IMAGE"


class ImageFolder(ImageFiles):
    """The images of a folder with a folder per class; the classes are in the order of their names.

    :param root: a local folder
    :param image_size: height and width to which the images are resized
    :param seed: of the fast loader's shuffling
    :param listed: what must not lie in this folder a second time
    :raises UsageError: when there is no such folder, it has fewer than two classes, or a class has no image
    """

    formats = None

    def __init__(
        self, root: str | Path, *, image_size: int = 64, seed: int = 0, listed: UniquePaths | None = None
    ) -> None:
        super().__init__(_FolderOfClasses(os.fspath(root), listed or UniquePaths()), image_size=image_size, seed=seed)


class _FolderOfClasses(LocalFolder):
    """Lists the images of every class."""

    def __init__(self, root: str, listed: UniquePaths) -> None:
        super().__init__(root)
        self._listed = listed

    def names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                folders = [entry for entry in entries if _is_seen(entry.name) and entry.is_dir()]
        except OSError as error:
            _raise(error)
        classes = sorted(self._listed.add(entry).name for entry in folders)
        if len(classes) < 2:
            raise UsageError(
                f"{self.root} needs a folder of images for each of two classes or more, and has {len(classes)}: "
                f"the layout is {LAYOUT}"
            )
        extensions = _readable_extensions()
        return [name for one in classes for name in self._images(one, extensions)]

    def _images(self, one: str, extensions: set[str]) -> list[str]:
        """The images of one class, relative to the root."""
        images: list[str] = []
        folders = [one]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(os.path.join(self.root, folder)) as entries:
                    for entry in entries:
                        if not _is_seen(entry.name):
                            continue
                        if entry.is_dir():
                            folders.append(os.path.join(folder, self._listed.add(entry).name))
                        elif os.path.splitext(entry.name)[1].lower() in extensions:
                            images.append(os.path.join(folder, self._listed.add(entry).name))
            except OSError as error:
                _raise(error)
        if not images:
            raise UsageError(
                f"{os.path.join(self.root, one)} holds no image that Pillow reads: add some, or remove the folder"
            )
        return images


def _readable_extensions() -> set[str]:
    """With their dots, in lower case."""
    from PIL import Image

    known = Image.registered_extensions()  # which imports Pillow's plugins
    return {extension for extension, image_format in known.items() if image_format in Image.OPEN}


def _is_seen(name: str) -> bool:
    return not name.startswith(".")


def _raise(error: OSError) -> NoReturn:
    raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from error
