"""``dataloading.dataset.storage``: the same names and bytes from every kind of place, and errors that name it."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from common.errors import UsageError
from dataloading.dataset.storage import (
    BadFile,
    FsspecFolder,
    LocalFolder,
    Storage,
    is_image,
    open_storage,
)


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.jpg"))


@pytest.fixture
def memory(pictures: Path) -> Iterator[str]:
    """The URL of the pictures in fsspec's memory."""
    fsspec.filesystem("memory").put(str(pictures), "/pictures", recursive=True)
    yield "memory://pictures"
    fsspec.filesystem("memory").rm("/pictures", recursive=True)


def the_same_content(place: Storage, folder: Path) -> bool:
    names = sorted(place.names())
    return names == names_below(folder) and all(place.read(name) == (folder / name).read_bytes() for name in names)


# A local folder


def test_a_path_and_a_file_url_are_a_local_folder(own_pictures: Path) -> None:
    assert " " in str(own_pictures)
    for root in (own_pictures, str(own_pictures), own_pictures.as_uri(), f"file://{own_pictures}"):
        place = open_storage(root)
        assert isinstance(place, LocalFolder)
        assert the_same_content(place, own_pictures)


def test_jpegs_in_the_folder_and_in_the_folders_in_it_are_found_and_nothing_else(tmp_path: Path) -> None:
    images = ["a.jpg", "b.JPG", "c.jpeg", "person/d.jpg", "person/e.JpEg", "Zoë/f.jpg"]
    others = ["a.png", "jpg", ".hidden.jpg", "person/._d.jpg", "person/notes.txt", "person/deeper/g.jpg", "a.jpg.part"]
    for name in images + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(LocalFolder(str(tmp_path)).names()) == sorted(images)
    assert [name for name in images + others if is_image(name)] == [*images, "person/deeper/g.jpg"]


def test_a_name_that_is_no_utf_8_can_be_read(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/J\xf6rg"))).mkdir()
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/J\xf6rg/1.jpg"))).write_bytes(b"bytes")
    place = LocalFolder(str(tmp_path))
    (name,) = place.names()
    assert os.fsencode(name) == b"J\xf6rg/1.jpg"
    assert place.read(name) == b"bytes"


@pytest.mark.parametrize("scheme, name", [("", "lfw.tgz"), ("", "lfw.tar.gz"), ("", "LFW.TAR"), ("file://", "lfw.tgz")])
def test_an_archive_is_refused_with_what_to_do(tmp_path: Path, name: str, scheme: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UsageError) as refused:
        open_storage(f"{scheme}{tmp_path / name}")
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / name} is an archive, which has no random access")
    assert f"unpack it first (tar -xf {tmp_path / name})" in message
    assert "\n" not in message


def test_a_folder_may_be_called_like_an_archive(tmp_path: Path) -> None:
    (tmp_path / "unpacked.tar").mkdir()
    (tmp_path / "unpacked.tar" / "a.jpg").touch()
    assert open_storage(tmp_path / "unpacked.tar").names() == ["a.jpg"]


def test_what_is_not_there_and_what_is_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(UsageError, match=r"^.*/missing is not there: give a folder of JPEGs$"):
        open_storage(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"^.*/missing.tgz is not there: give a folder of JPEGs$"):
        open_storage(tmp_path / "missing.tgz")
    with pytest.raises(UsageError, match=r"^.*/photo\.jpg is a file, not a folder of JPEGs$"):
        open_storage(tmp_path / "photo.jpg")


def test_a_folder_that_cannot_be_listed_is_named(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(UsageError, match=rf"^{own_pictures}/\w+ cannot be listed: Permission denied$"):
        open_storage(own_pictures).names()


def test_a_file_that_cannot_be_opened_or_read_is_named(own_pictures: Path) -> None:
    (own_pictures / "round.jpg").symlink_to("round.jpg")
    (own_pictures / "folder.jpg").mkdir()
    place = open_storage(own_pictures)
    for name, reason in {
        "gone.jpg": "cannot be opened: No such file or directory",
        "round.jpg": "cannot be opened: Too many levels of symbolic links",
        "folder.jpg": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(BadFile) as bad:
            place.read(name)
        assert str(bad.value) == f"{own_pictures / name} {reason}"


def test_a_pipe_or_device_in_place_of_a_file_is_named(own_pictures: Path) -> None:
    os.mkfifo(own_pictures / "pipe.jpg")
    (own_pictures / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        with pytest.raises(BadFile, match=f"^{own_pictures / name} is no regular file: remove it$"):
            open_storage(own_pictures).read(name)


def test_a_file_that_is_too_long_for_an_image_is_not_read(own_pictures: Path, memory: str) -> None:
    with open(own_pictures / "long.jpg", "wb") as file:
        file.truncate(10**12)  # sparse
    with pytest.raises(
        BadFile, match=r"long\.jpg has 1,000,000,000,000 bytes, and an image may have 100,000,000: remove"
    ):
        open_storage(own_pictures).read("long.jpg")


def test_too_many_open_files_come_with_what_to_do(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    place = open_storage(own_pictures)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        BadFile, match=r"cannot be opened: Too many open files \(raise the limit with ulimit -n, or use "
    ):
        place.read("a.jpg")


def test_a_file_that_comes_in_pieces_is_read_whole(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, n: whole_read(descriptor, min(n, 100)))
    assert the_same_content(open_storage(own_pictures), own_pictures)


# fsspec


def test_fsspecs_protocols_are_known(memory: str, pictures: Path) -> None:
    for root in (memory, f"{memory}/"):
        place = open_storage(root)
        assert isinstance(place, FsspecFolder)
        assert the_same_content(place, pictures)
    assert the_same_content(pickle.loads(pickle.dumps(open_storage(memory))), pictures)


def test_what_is_not_in_fsspecs_storage_is_named(memory: str) -> None:
    with pytest.raises(UsageError, match=r"^memory://missing is not there, or not a folder$"):
        open_storage("memory://missing")
    with pytest.raises(BadFile, match=r"^memory://pictures/gone.jpg cannot be read: FileNotFoundError: "):
        open_storage(memory).read("gone.jpg")


def _missing_plugin(*arguments: Any) -> Any:
    raise ImportError("it needs aiohttp")


def _no_access(*arguments: Any) -> Any:
    raise PermissionError("Access Denied for http://me:secret@host\n")


@pytest.mark.parametrize(
    "root, failure, line",
    [
        ("nonsense://bucket/faces", None, "nonsense://bucket/faces cannot be opened: ValueError: Protocol not known.*"),
        ("s3://bucket", _missing_plugin, "s3://bucket cannot be opened: ImportError: it needs aiohttp"),
        (
            "http://me:secret@host/faces/",
            _missing_plugin,
            r"http://me:\*\*\*@host/faces cannot be opened: ImportError: it needs aiohttp; pip install 'raw-ddp\[remote\]'",
        ),
        (
            "http://me:secret@host/faces",
            _no_access,
            r"http://me:\*\*\*@host/faces cannot be opened: PermissionError: Access Denied for http://me:\*\*\*@host",
        ),
    ],
)
def test_what_fsspec_cannot_open_is_one_line_without_a_password(
    monkeypatch: pytest.MonkeyPatch, root: str, failure: Callable[..., Any] | None, line: str
) -> None:
    """What fsspec cannot open is one line without a password.

    Claim (dataloading/README.md, 8): a server may drip, flood, lie or curse; a password is never printed.
    """
    if failure is not None:
        monkeypatch.setattr(fsspec.core, "url_to_fs", failure)
    with pytest.raises(UsageError) as refused:
        open_storage(root)
    assert re.fullmatch(line, str(refused.value))


@pytest.fixture
def server(pictures: Path) -> Iterator[str]:
    """The URL of the pictures on a server of Python's own."""
    pytest.importorskip("aiohttp", reason="no aiohttp: pip install 'raw-ddp[remote]'")
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(pictures)]
    with subprocess.Popen(command, stdout=-1, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split("(")[1].split(")")[0]
        process.kill()


def test_an_http_server_has_the_folders_names_and_bytes(server: str, pictures: Path) -> None:
    assert the_same_content(open_storage(server), pictures)
    with pytest.raises(BadFile, match=f"^{server}gone.jpg cannot be read: FileNotFoundError"):
        open_storage(server).read("gone.jpg")


# The error


def test_a_bad_files_message_survives_a_dataloaders_way_of_raising_it_again() -> None:
    """``DataLoader`` makes a new error, whose message is the worker's traceback."""
    text = (
        "Caught BadFile in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "storage.py", line 1, in open\ndataloading.storage.BadFile: a/b.jpg cannot be opened: why\n'
    )
    assert str(BadFile(text)) == str(BadFile("a/b.jpg cannot be opened: why")) == "a/b.jpg cannot be opened: why"
    assert str(pickle.loads(pickle.dumps(BadFile("a.jpg is empty")))) == "a.jpg is empty"
