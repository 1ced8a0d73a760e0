"""Where a data set's bytes come from: a local folder, an HTTP server, or whatever fsspec has a plugin for.

A loader's threads and processes all read through one of these, so they hold nothing that a fork would break: an HTTP
connection belongs to the thread (and the process) that opened it.
"""

from __future__ import annotations

import concurrent.futures
import errno
import http.client
import io
import os
import re
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any, Protocol

from common.errors import UsageError

SUFFIXES = (".jpg", ".jpeg")
ARCHIVES = (".tgz", ".tar", ".tar.gz", ".zip")
TIMEOUT_S = 10.0
TRIES = 4
FIRST_PAUSE_S = 0.1  # doubled before each further try
LISTING_THREADS = 32


class BadFile(UsageError):
    """A file of the data set that cannot be read or decoded. The message names it.

    When a loader worker raises it, ``DataLoader`` makes a new one whose text is the worker's traceback; the message is
    its last line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message.rstrip().rsplit(f"{type(self).__name__}: ", 1)[-1])


class Unskippable(BadFile):
    """Not this file is bad but the machine, the server, or the way in which files are asked for: others would fail too."""


class Reader(Protocol):
    """An opened file."""

    def read(self) -> bytes: ...

    def close(self) -> None: ...


class Storage(Protocol):
    """A folder of image files somewhere."""

    root: str

    def names(self) -> list[str]:
        """The image files in the folder and in the folders in it, in no order, with ``/`` between folder and file."""

    def open(self, name: str) -> Reader:
        """:raises BadFile: when it is not there, or cannot be opened"""


def open_storage(root: str | Path) -> Storage:
    """The storage for a folder's path or URL.

    :raises UsageError: when it is not there, is a file, or has a protocol that nothing here knows
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
            return _Descriptor(os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)), path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "raise the limit with ulimit -n, or use fewer workers or threads"
                raise Unskippable(f"{path} cannot be opened: {error.strerror} ({advice})") from error
            raise BadFile(f"{path} cannot be opened: {error.strerror}") from error


class _Descriptor:
    """An open file, read whole by two system calls; Python's own file object takes twice as long to make."""

    def __init__(self, descriptor: int, path: str) -> None:
        self._descriptor, self._path = descriptor, path

    def read(self) -> bytes:
        try:
            size = os.fstat(self._descriptor).st_size
            data = os.read(self._descriptor, size)
            while len(data) < size and (more := os.read(self._descriptor, size - len(data))):
                data += more
        except OSError as error:
            raise BadFile(f"{self._path} cannot be read: {error.strerror}") from error
        return data

    def close(self) -> None:
        os.close(self._descriptor)


class HttpFolder:
    """A folder that an HTTP server lists as links, as ``python -m http.server``, nginx and Apache do.

    The standard library's client, since fsspec's needs aiohttp and sends everything through one thread. Each thread keeps
    its connection. A request that fails is tried again, :data:`TRIES` times in all.
    """

    def __init__(self, root: str, timeout_s: float = TIMEOUT_S) -> None:
        self.root = root.rstrip("/")
        try:
            self._url = urllib.parse.urlsplit(self.root)
            self._host, self._port = self._url.hostname, self._url.port
            (self._host or "").encode("idna")
        except ValueError as error:
            raise UsageError(f"{root} is no URL: {error}") from error
        if not self._host:
            raise UsageError(f"{root} names no host")
        self._path = urllib.parse.quote(self._url.path, safe="/%")
        self._timeout_s = timeout_s
        self._local = _Connections()

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
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read()
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
                self._local.drop()
                continue
            if response.status == 200:
                return body
            reason = f"the server says {response.status} {response.reason}"
            if response.status < 500 and response.status != 429:  # it means it
                raise BadFile(f"{self.root}/{name} cannot be read: {reason}")
        raise Unskippable(f"{self.root}/{name} cannot be read in {TRIES} tries: {reason}; is the server well?")

    def _connection(self) -> http.client.HTTPConnection:
        connection = self._local.get()
        if connection is None:
            secure = self._url.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            connection = kind(self._host or "", self._port, timeout=self._timeout_s)
            self._local.put(connection)
        return connection


class _Connections:
    """One connection per thread; none travels to another process, by fork or by pickle."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> http.client.HTTPConnection | None:
        held: _Held | None = getattr(self._local, "held", None)
        return held.connection if held and held.process == os.getpid() else None

    def put(self, connection: http.client.HTTPConnection) -> None:
        self._local.held = _Held(os.getpid(), connection)

    def drop(self) -> None:
        del self._local.held

    def __reduce__(self) -> tuple[type[_Connections], tuple[()]]:
        return _Connections, ()


class _Held:
    """A connection of this process, which is closed when its thread ends, or the storage."""

    def __init__(self, process: int, connection: http.client.HTTPConnection) -> None:
        self.process, self.connection = process, connection

    def __del__(self) -> None:
        self.connection.close()


class FsspecFolder:
    """Whatever fsspec knows: ``s3://``, ``gs://``, ``memory://`` and so on, with the user's own plugins and settings."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        try:
            files, self._path = self._connect()
            if not files.isdir(self._path):
                raise UsageError(f"{root} is not there, or not a folder")
        except (ValueError, ImportError) as error:
            raise UsageError(f"{root} cannot be opened by fsspec: {error}") from error
        except UsageError:
            raise
        except Exception as error:  # each plugin has its own
            raise UsageError(f"{root} cannot be read: {type(error).__name__}: {error}") from error

    def names(self) -> list[str]:
        prefix = self._path.rstrip("/") + "/"
        try:
            paths = self._connect()[0].find(self._path, maxdepth=2)
        except Exception as error:
            raise UsageError(f"{self.root} cannot be listed: {type(error).__name__}: {error}") from error
        return [path.removeprefix(prefix) for path in paths if is_image(path)]

    def open(self, name: str) -> Reader:
        try:
            return io.BytesIO(self._connect()[0].cat_file(f"{self._path.rstrip('/')}/{name}"))
        except Exception as error:  # each plugin has its own
            raise BadFile(f"{self.root}/{name} cannot be read: {type(error).__name__}: {error}") from error

    def _connect(self) -> tuple[Any, str]:
        """The plugin's file system and the path in it. fsspec keeps one for each process, since most do not survive a fork;
        so it is asked each time."""
        import fsspec

        found: tuple[Any, str] = fsspec.core.url_to_fs(self.root)
        return found


def is_image(name: str) -> bool:
    """Whether the name is that of a JPEG file; those that begin with a dot are some system's own."""
    return name.lower().endswith(SUFFIXES) and not name.rsplit("/", 1)[-1].startswith(".")
