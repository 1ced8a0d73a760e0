"""Where a data set's bytes come from: a local folder, an HTTP server, or any storage that fsspec has a plugin for.

All threads and processes of a loader read through one storage object, so it holds nothing that a fork would break: an HTTP
connection belongs to the thread and the process that opened it.
"""

from __future__ import annotations

import concurrent.futures
import errno
import http.client
import io
import os
import re
import stat
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Protocol

from common.errors import UsageError, one_line
from dataloading.dataset.http_connection import TIMEOUT_S, TOTAL_S, Connection, TooLong

SUFFIXES = (".jpg", ".jpeg")
ARCHIVES = (".tgz", ".tar", ".tar.gz", ".zip")
MOST_BYTES = 100_000_000  # of one file: an image of the most pixels takes fewer
TRIES = 4
FIRST_PAUSE_S = 0.1  # doubled before each further try
LISTING_THREADS = 32
MOST_WORDS = 200  # letters of an error's text that are shown


class BadFile(UsageError):
    """A file of the data set that cannot be read or decoded. The message names it.

    When a loader worker raises it, ``DataLoader`` raises a new one whose text is the worker's traceback. Its last line is
    the message.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rstrip().rsplit(f"{type(self).__name__}: ", 1)[-1])


class Unskippable(BadFile):
    """The cause is not this file but the machine, the server or a setting, so other files would fail too."""


class Reader(Protocol):
    """An opened file."""

    def read(self) -> bytes: ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A folder of image files somewhere."""

    root: str

    def names(self) -> list[str]:
        """The image files in the folder and its direct subfolders, unordered, with ``/`` between folder and file."""

    def open(self, name: str) -> Reader:
        """:raises BadFile: when the file is missing or cannot be opened"""


def open_storage(root: str | Path) -> Storage:
    """The storage for a folder's path or URL.

    :raises UsageError: when it is missing, is a file, or has an unknown protocol
    """
    text = os.fspath(root)
    protocol = text.split("://", 1)[0] if "://" in text else "file"
    if protocol == "file":
        if text.startswith("file://"):
            text = urllib.parse.unquote(text.removeprefix("file://"))
        return LocalFolder(text)
    return HttpFolder(text) if protocol in ("http", "https") else FsspecFolder(text)


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
        found = []
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if entry.is_dir():
                        found += [f"{entry.name}/{name}" for name in os.listdir(entry.path) if is_image(name)]
                    elif is_image(entry.name):
                        found.append(entry.name)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from error
        return found

    def open(self, name: str) -> Reader:
        path = os.path.join(self.root, name)
        try:
            # Not blocking: the open of a pipe would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
            return _Descriptor(descriptor, path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "raise the limit with ulimit -n, or use fewer workers or threads"
                raise Unskippable(f"{path} cannot be opened: {error.strerror} ({advice})") from error
            raise BadFile(f"{path} cannot be opened: {error.strerror}") from error


class _Descriptor:
    """An open file, read whole by two system calls. Creating Python's own file object takes twice as long."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self._path = descriptor, path

    def read(self) -> bytes:
        try:
            found = os.fstat(self._descriptor)
            size = found.st_size
            if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # os.read names a folder
                raise BadFile(f"{self._path} is no regular file: remove it")
            if size > MOST_BYTES:
                raise BadFile(_too_long(self._path, f"{size:,} bytes"))
            data = os.read(self._descriptor, size)
            while len(data) < size and (more := os.read(self._descriptor, size - len(data))):
                data += more
        except OSError as error:
            raise BadFile(f"{self._path} cannot be read: {error.strerror}") from error
        return data

    def close(self) -> None:
        os.close(self._descriptor)


def _too_long(name: str, size: str) -> str:
    return f"{name} has {size}, and an image may have {MOST_BYTES:,}: remove it"


class HttpFolder:
    """A folder that an HTTP server lists as links, as ``python -m http.server``, nginx and Apache do.

    It uses the standard library, since fsspec's HTTP needs aiohttp, which torch does not bring, and sends all requests
    through one thread. Each thread here keeps its own connection. A request that fails is repeated: :data:`TRIES` in all.

    :param root: the URL; a user and a password in it are sent to the server, and never printed
    :param timeout_s: seconds without a byte after which a request fails
    :param total_s: seconds that a whole request may take
    :raises UsageError: when the URL is malformed
    """

    def __init__(self, root: str, timeout_s: float = TIMEOUT_S, total_s: float = TOTAL_S) -> None:
        self.root = without_password(root).rstrip("/")
        try:
            self._url = urllib.parse.urlsplit(root.rstrip("/"))
            host, _ = self._url.hostname or "", self._url.port
            host.encode("idna")
            if not host.isprintable() or " " in host:
                raise ValueError("its host has a space or a control character")
        except ValueError as error:
            raise UsageError(f"{self.root} is no URL: {error}") from error
        if not host:
            raise UsageError(f"{without_password(root)} names no host: a URL is http://HOST/FOLDER")
        self._path = urllib.parse.quote(self._url.path, safe="/%")
        self._limits = timeout_s, total_s
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[HttpFolder], tuple[str, float, float]]:
        return HttpFolder, (self._url.geturl(), *self._limits)  # without the connections

    def names(self) -> list[str]:
        top = self._links("")
        folders = [link for link in top if link.endswith("/")]
        with concurrent.futures.ThreadPoolExecutor(LISTING_THREADS) as pool:
            inside = pool.map(self._links, folders)
            found = [folder + link for folder, links in zip(folders, inside, strict=True) for link in links]
        return [link for link in top + found if is_image(link)]

    def open(self, name: str) -> Reader:
        return io.BytesIO(self._get(name))

    def _links(self, folder: str) -> list[str]:
        """The relative links on a folder's page: a name, or a name and a slash."""
        try:
            page = self._get(folder)
        except BadFile as error:
            raise UsageError(f"{error}; the folder cannot be listed") from error
        links = re.findall(r'href="([^"?#]+)"', page.decode("utf-8", "replace"), re.IGNORECASE)
        relative = (urllib.parse.unquote(link, errors="surrogateescape") for link in links)
        return sorted({link for link in relative if re.fullmatch(r"[^/:]+/?", link) and link not in ("./", "../")})

    def _get(self, name: str) -> bytes:
        path = f"{self._path}/{urllib.parse.quote(name, errors='surrogateescape')}"
        for attempt in range(TRIES):
            if attempt:
                time.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            connection = self._connection()
            try:
                status, words, body = connection.get(path, MOST_BYTES)
            except TooLong:
                connection.close()
                raise BadFile(_too_long(f"{self.root}/{name}", "more bytes")) from None
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {_printable(str(error))}"
                connection.close()  # the next request opens it again
                continue
            if status == 200:
                return body
            reason = f"the server says {status} {_printable(words)}"
            if status < 500 and status != 429:  # these statuses are final
                raise BadFile(f"{self.root}/{name} cannot be read: {reason}")
        raise Unskippable(f"{self.root}/{name} cannot be read in {TRIES} tries: {reason}; check the server")

    def _connection(self) -> Connection:
        """The connection of this thread, in this process: a socket inherited through fork must not be shared."""
        if getattr(self._local, "process", None) != os.getpid():
            self._local.connection = Connection(self._url, *self._limits)
            self._local.process = os.getpid()
        connection: Connection = self._local.connection
        return connection


def without_password(url: str) -> str:
    """The URL as it may be printed: ``http://user:***@host/``."""
    return re.sub(r"(://[^/?#@:]*:)[^/?#]*@", r"\1***@", url)


def _printable(words: str) -> str:
    """What a server says, as a part of one line."""
    shown = one_line(words)
    return shown if len(shown) <= MOST_WORDS else f"{shown[:MOST_WORDS]}..."


class FsspecFolder:
    """A folder of fsspec: ``s3://``, ``gs://``, ``memory://`` and so on, with the user's own plugins and settings.

    :raises UsageError: when fsspec cannot open it
    """

    def __init__(self, root: str) -> None:
        self._given, self.root = root.rstrip("/"), without_password(root).rstrip("/")
        try:
            files, self._path = self._connect()
            if not files.isdir(self._path):
                raise UsageError(f"{self.root} is not there, or not a folder")
        except (ValueError, ImportError) as error:
            raise UsageError(f"{self.root} cannot be opened by fsspec: {self._words(error)}") from error
        except UsageError:
            raise
        except Exception as error:  # each plugin has its own types of errors
            raise UsageError(f"{self.root} cannot be read: {type(error).__name__}: {self._words(error)}") from error

    def names(self) -> list[str]:
        prefix = self._path.rstrip("/") + "/"
        try:
            paths = self._connect()[0].find(self._path, maxdepth=2)
        except Exception as error:
            raise UsageError(f"{self.root} cannot be listed: {type(error).__name__}: {self._words(error)}") from error
        return [path.removeprefix(prefix) for path in paths if is_image(path)]

    def open(self, name: str) -> Reader:
        try:
            content = self._connect()[0].cat_file(f"{self._path.rstrip('/')}/{name}", start=0, end=MOST_BYTES + 1)
        except Exception as error:  # each plugin has its own types of errors
            raise BadFile(f"{self.root}/{name} cannot be read: {type(error).__name__}: {self._words(error)}") from error
        if len(content) > MOST_BYTES:
            raise BadFile(_too_long(f"{self.root}/{name}", "more bytes"))
        return io.BytesIO(content)

    def _words(self, error: Exception) -> str:
        """An error's text, in which a plugin may have quoted the whole URL."""
        return _printable(without_password(str(error)))

    def _connect(self) -> tuple[Any, str]:
        """The plugin's file system and the path in it.

        fsspec caches one file system per process, since most do not survive a fork. So this asks fsspec each time.
        """
        import fsspec

        found: tuple[Any, str] = fsspec.core.url_to_fs(self._given)
        return found


def is_image(name: str) -> bool:
    """Whether the name is that of a JPEG file; hidden files are left out."""
    return name.lower().endswith(SUFFIXES) and not name.rsplit("/", 1)[-1].startswith(".")
