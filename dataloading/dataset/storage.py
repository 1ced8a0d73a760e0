"""Where a data set's bytes come from: a local folder, or any storage that fsspec has a plugin for (``s3://``, ``http://``, ...).

All threads and processes of a loader read through one storage object, so it holds nothing that a fork would break.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import urllib.parse
from pathlib import Path
from typing import Any, Protocol

from common.data.loaders import BadSample
from common.errors import UsageError, one_line

SUFFIXES = (".jpg", ".jpeg")
ARCHIVES = (".tgz", ".tar", ".tar.gz", ".zip")
MOST_BYTES = 100_000_000  # of one file: an image of the most pixels takes fewer
MOST_LETTERS = 200  # of an error's text that are shown


class BadFile(BadSample):
    """A file of the data set that cannot be read or decoded. The message names it."""


class Unskippable(BadFile):
    """The cause is not this file but the machine or a setting, so other files would fail too."""


class Storage(Protocol):
    """A folder of image files somewhere."""

    root: str

    def names(self) -> list[str]:
        """The image files in the folder and its direct subfolders, unordered, with ``/`` between folder and file."""

    def read(self, name: str) -> bytes:
        """The content of a file.

        :raises BadFile: when it is missing or cannot be read
        """


def open_storage(root: str | Path) -> Storage:
    """The storage for a folder's path or URL.

    :raises UsageError: when it is missing, is a file, or has an unknown protocol
    """
    text = os.fspath(root)
    if text.startswith("file://"):
        text = urllib.parse.unquote(text.removeprefix("file://"))
    return FsspecFolder(text) if "://" in text else LocalFolder(text)


class LocalFolder:
    """A folder on a mounted file system."""

    def __init__(self, root: str) -> None:
        self.root = root
        if root.lower().endswith(ARCHIVES) and os.path.isfile(root):
            raise UsageError(
                f"{root} is an archive, which has no random access to its files: unpack it first "
                f"(tar -xf {root}) and give the folder that comes out"
            )
        if not os.path.isdir(root):
            raise UsageError(
                f"{root} is {'a file, not' if os.path.exists(root) else 'not there: give'} a folder of JPEGs"
            )

    def names(self) -> list[str]:
        names = []
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.is_dir():
                        names += [f"{entry.name}/{name}" for name in os.listdir(entry.path) if is_image(name)]
                    elif is_image(entry.name):
                        names.append(entry.name)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from error
        return names

    def read(self, name: str) -> bytes:
        """The content of a file, by two system calls. To make Python's own file object takes twice as long."""
        path = os.path.join(self.root, name)
        try:
            # Not blocking: the open of a pipe would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "raise the limit with ulimit -n, or use fewer workers or threads"
                raise Unskippable(f"{path} cannot be opened: {error.strerror} ({advice})") from error
            raise BadFile(f"{path} cannot be opened: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            size = status.st_size
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # os.read names a folder
                raise BadFile(f"{path} is no regular file: remove it")
            if size > MOST_BYTES:
                raise BadFile(_too_long(path, f"{size:,} bytes"))
            data = os.read(descriptor, size)
            while len(data) < size and (more := os.read(descriptor, size - len(data))):
                data += more
            return data
        except OSError as error:
            raise BadFile(f"{path} cannot be read: {error.strerror}") from error
        finally:
            os.close(descriptor)


def _too_long(name: str, size: str) -> str:
    return f"{name} has {size}, and an image may have {MOST_BYTES:,}: remove it"


class FsspecFolder:
    """A folder of fsspec: ``s3://``, ``http://``, ``memory://`` and so on, with the user's own plugins and settings.

    :raises UsageError: when fsspec cannot open it
    """

    def __init__(self, root: str) -> None:
        self._url, self.root = root.rstrip("/"), _without_password(root).rstrip("/")
        try:
            files, self._path = self._connect()
            if not files.isdir(self._path):
                raise UsageError(f"{self.root} is not there, or not a folder")
        except UsageError:
            raise
        except Exception as error:  # each plugin has its own types of errors
            extra = isinstance(error, ImportError) and root.startswith(("http:", "https:"))
            advice = "; pip install 'raw-ddp[remote]'" if extra else ""
            raise UsageError(f"{self.root} cannot be opened: {_text(error)}{advice}") from error

    def names(self) -> list[str]:
        try:
            paths = self._connect()[0].find(self._path, maxdepth=2)
        except Exception as error:
            raise UsageError(f"{self.root} cannot be listed: {_text(error)}") from error
        return [path.removeprefix(f"{self._path.rstrip('/')}/") for path in paths if is_image(path)]

    def read(self, name: str) -> bytes:
        try:
            content: bytes = self._connect()[0].cat_file(
                f"{self._path.rstrip('/')}/{name}", start=0, end=MOST_BYTES + 1
            )
        except Exception as error:  # each plugin has its own types of errors
            raise BadFile(f"{self.root}/{name} cannot be read: {_text(error)}") from error
        if len(content) > MOST_BYTES:
            raise BadFile(_too_long(f"{self.root}/{name}", "more bytes"))
        return content

    def _connect(self) -> tuple[Any, str]:
        """The plugin's file system and the path in it.

        fsspec caches one file system per process, since most do not survive a fork. So this asks fsspec each time.
        """
        import fsspec

        file_system: tuple[Any, str] = fsspec.core.url_to_fs(self._url)
        return file_system


def _text(error: Exception) -> str:
    """An error's type and text in one line, without the password of a URL that a plugin has quoted."""
    return f"{type(error).__name__}: {one_line(_without_password(str(error)))[:MOST_LETTERS]}"


def _without_password(url: str) -> str:
    """The URL as it may be printed: ``http://user:***@host/``."""
    return re.sub(r"(://[^/?#@:]*:)[^/?#]*@", r"\1***@", url)


def is_image(name: str) -> bool:
    """Whether the name is that of a JPEG file; hidden files are left out."""
    return name.lower().endswith(SUFFIXES) and not name.rsplit("/", 1)[-1].startswith(".")
