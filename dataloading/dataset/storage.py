"""Where a data set's bytes come from: a folder. Storage elsewhere has to be mounted, or copied.

All threads and processes of a loader read through one storage object, so it holds nothing that a fork would break.
"""

from __future__ import annotations

import errno
import os
from typing import Protocol

from common.data.loaders import BadSample
from common.errors import UsageError

SUFFIXES = (".jpg", ".jpeg")
MOST_BYTES = 100_000_000  # of one file: an image of the most pixels takes fewer


class BadFile(BadSample):
    """A file of the data set that cannot be read or decoded. The message names it."""


class Storage(Protocol):
    """A folder of image files."""

    root: str

    def names(self) -> list[str]:
        """The image files in the folder and its direct subfolders, unordered, with ``/`` between folder and file."""

    def read(self, name: str) -> bytes:
        """The content of a file.

        :raises BadFile: when it is missing or cannot be read
        """


class UniquePaths:
    """The files and folders of a data set, each by one path. By a second one, a link, images would count twice, perhaps for training
    and for testing."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}  # by inode number

    def add(self, entry: os.DirEntry[str]) -> os.DirEntry[str]:
        """The entry itself.

        :raises UsageError: if it was added by another path
        """
        try:  # the listing of a folder has the numbers, so only a link costs a system call
            number = os.stat(entry.path).st_ino if entry.is_symlink() else entry.inode()
            first = self._paths.setdefault(number, entry.path)
            twice = first != entry.path and os.path.samefile(first, entry.path)
        except OSError:  # a link to nothing: read() reports it
            return entry
        if twice:
            raise UsageError(
                f"{entry.path} is the same as {first}, by a link: its images would count twice, perhaps for training and for testing: "
                "remove one of them"
            )
        return entry


class LocalFolder:
    """A folder on a mounted file system.

    :raises UsageError: when it is missing, or no folder
    """

    def __init__(self, root: str) -> None:
        self.root = root
        if os.path.isdir(root):
            return
        if "://" in root:
            raise UsageError(f"{root} is a URL: mount it as a folder, or copy it, and give that folder")
        if not os.path.exists(root):
            raise UsageError(f"{root} is not there: give a folder of JPEGs")
        raise UsageError(f"{root} is a file, not a folder of JPEGs (an archive has to be unpacked first)")

    def names(self) -> list[str]:
        names, listed = [], UniquePaths()
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.is_dir():
                        with os.scandir(entry.path) as inner:
                            files = [file for file in inner if is_image(file.name)]
                        names += [f"{entry.name}/{listed.add(file).name}" for file in files]
                    elif is_image(entry.name):
                        names.append(listed.add(entry).name)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from error
        return names

    def read(self, name: str) -> bytes:
        """The content of a file, by two system calls. To make Python's own file object takes twice as long."""
        path = os.path.join(self.root, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # not blocking: a pipe would wait for a writer
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # nothing is wrong with this file: loader_errors says what to do
            raise BadFile(f"{path} cannot be opened: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size > MOST_BYTES:
                raise BadFile(f"{path} has {size:,} bytes, and an image may have {MOST_BYTES:,}: remove it")
            data = os.read(descriptor, size)
            while len(data) < size and (more := os.read(descriptor, size - len(data))):
                data += more
            return data
        except OSError as error:
            raise BadFile(f"{path} cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)


def is_image(name: str) -> bool:
    """Whether the name is that of a JPEG file; hidden files are left out."""
    return name.lower().endswith(SUFFIXES) and not name.rsplit("/", 1)[-1].startswith(".")
