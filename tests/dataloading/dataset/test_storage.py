"""``dataloading.dataset.storage``: the same names and bytes from every kind of place, and errors that name it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from common.errors import UsageError
from dataloading.dataset import storage
from dataloading.dataset.storage import (
    TRIES,
    BadFile,
    FsspecFolder,
    HttpFolder,
    LocalFolder,
    Storage,
    is_image,
    open_storage,
)
from tests.dataloading.faults import FaultyServer, serve


def read(place: Storage, name: str) -> bytes:
    reader = place.open(name)
    try:
        return reader.read()
    finally:
        reader.close()


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.jpg"))


@pytest.fixture
def memory(pictures: Path) -> Iterator[str]:
    """The URL of the pictures in fsspec's memory."""
    fsspec.filesystem("memory").put(str(pictures), "/pictures", recursive=True)
    yield "memory://pictures"
    fsspec.filesystem("memory").rm("/pictures", recursive=True)


@pytest.fixture
def server(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)
    with serve(pictures) as served:
        yield served


def the_same_content(place: Storage, folder: Path) -> bool:
    names = sorted(place.names())
    return names == names_below(folder) and all(read(place, name) == (folder / name).read_bytes() for name in names)


# A local folder


def test_a_path_and_a_file_url_are_a_local_folder(own_pictures: Path) -> None:
    assert " " in str(own_pictures)
    for root in (own_pictures, str(own_pictures), own_pictures.as_uri(), f"file://{own_pictures}"):
        place = open_storage(root)
        assert isinstance(place, LocalFolder)
        assert the_same_content(place, own_pictures)


def test_jpegs_in_the_folder_and_in_the_folders_in_it_are_found_and_nothing_else(tmp_path: Path) -> None:
    found = ["a.jpg", "b.JPG", "c.jpeg", "person/d.jpg", "person/e.JpEg", "Zoë/f.jpg"]
    others = ["a.png", "jpg", ".hidden.jpg", "person/._d.jpg", "person/notes.txt", "person/deeper/g.jpg", "a.jpg.part"]
    for name in found + others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(LocalFolder(str(tmp_path)).names()) == sorted(found)
    assert [name for name in found + others if is_image(name)] == [*found, "person/deeper/g.jpg"]


def test_a_name_that_is_no_utf_8_can_be_read(tmp_path: Path) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/J\xf6rg"))).mkdir()
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/J\xf6rg/1.jpg"))).write_bytes(b"bytes")
    with serve(tmp_path) as served:
        for place in (LocalFolder(str(tmp_path)), HttpFolder(served.url)):
            (name,) = place.names()
            assert os.fsencode(name) == b"J\xf6rg/1.jpg" or isinstance(place, HttpFolder)
            assert read(place, name) == b"bytes"


@pytest.mark.parametrize("name", ["lfw.tgz", "lfw.tar", "lfw.tar.gz", "LFW.TGZ"])
@pytest.mark.parametrize("scheme", ["", "file://"])
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
            read(place, name)
        assert str(bad.value) == f"{own_pictures / name} {reason}"


def test_a_pipe_or_device_in_place_of_a_file_is_named(own_pictures: Path) -> None:
    os.mkfifo(own_pictures / "pipe.jpg")
    (own_pictures / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        with pytest.raises(BadFile, match=f"^{own_pictures / name} is no regular file: remove it$"):
            read(open_storage(own_pictures), name)


def test_a_file_that_is_too_long_for_an_image_is_not_read(own_pictures: Path, memory: str) -> None:
    with open(own_pictures / "long.jpg", "wb") as file:
        file.truncate(10**12)  # sparse
    with pytest.raises(
        BadFile, match=r"long\.jpg has 1,000,000,000,000 bytes, and an image may have 100,000,000: remove"
    ):
        read(open_storage(own_pictures), "long.jpg")


def test_too_many_open_files_come_with_what_to_do(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    place = open_storage(own_pictures)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        BadFile, match=r"cannot be opened: Too many open files \(raise the limit with ulimit -n, or use "
    ):
        place.open("a.jpg")


def test_a_file_that_comes_in_pieces_is_read_whole(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, n: whole_read(descriptor, min(n, 100)))
    assert the_same_content(open_storage(own_pictures), own_pictures)


# An HTTP server


def test_a_server_has_the_folders_names_and_bytes(server: FaultyServer, pictures: Path) -> None:
    for root in (server.url, f"{server.url}/"):
        place = open_storage(root)
        assert isinstance(place, HttpFolder)
        assert the_same_content(place, pictures)


def test_names_and_addresses_may_have_any_characters(pictures: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos of Zoë" / "100 %"
    folder.mkdir(parents=True)
    shutil.copytree(pictures / "Ann_Lee", folder / "Ann Lee & Söhne #1?")
    with serve(tmp_path) as served:
        assert the_same_content(open_storage(f"{served.url}/photos of Zoë/100 %25"), folder)
        assert the_same_content(open_storage(f"{served.url}/photos%20of%20Zo%C3%AB/100%20%25"), folder)


@pytest.mark.parametrize("fault", ["503", "429", "drop", "cut"])
def test_a_server_that_fails_for_a_while_is_asked_again(server: FaultyServer, pictures: Path, fault: str) -> None:
    place = open_storage(server.url)
    name = names_below(pictures)[0]
    server.faults = [fault] * (TRIES - 1)
    assert read(place, name) == (pictures / name).read_bytes()
    assert [path for path, _ in server.requests] == [f"/{name}"] * TRIES


@pytest.mark.parametrize(
    "fault, reason",
    [("503", "the server says 503 Service Unavailable"), ("drop", "RemoteDisconnected"), ("cut", "IncompleteRead")],
)
def test_a_server_that_goes_on_failing_is_given_up_after_some_tries(
    server: FaultyServer, fault: str, reason: str
) -> None:
    server.faults = [fault] * (TRIES + 1)
    with pytest.raises(BadFile) as bad:
        open_storage(server.url).open("some.jpg")
    message = str(bad.value)
    assert message.startswith(f"{server.url}/some.jpg cannot be read in {TRIES} tries: {reason}")
    assert message.endswith("; check the server")
    assert len(server.requests) == TRIES


def test_a_server_that_never_answers_is_given_up_after_some_tries(server: FaultyServer) -> None:
    server.faults = ["silent"] * (TRIES + 1)
    with pytest.raises(
        BadFile, match=f"^{server.url}/some.jpg cannot be read in {TRIES} tries: TimeoutError: timed out; "
    ):
        HttpFolder(server.url, timeout_s=0.05).open("some.jpg")
    assert len(server.requests) == TRIES


def test_where_no_server_is_the_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "FIRST_PAUSE_S", 0.001)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no process listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            UsageError, match=f"^{url}/ cannot be read in 4 tries: ConnectionRefusedError.* cannot be listed$"
        ):
            open_storage(url).names()


def test_what_a_server_does_not_have_is_asked_for_once(server: FaultyServer) -> None:
    with pytest.raises(BadFile, match=f"^{server.url}/gone.jpg cannot be read: the server says 404 File not found$"):
        open_storage(server.url).open("gone.jpg")
    assert len(server.requests) == 1
    with pytest.raises(UsageError, match=r"404 File not found; the folder cannot be listed$"):
        open_storage(f"{server.url}/missing").names()


@pytest.mark.parametrize(
    "url", ["http://", "http://:80/a", "http://host:port/a", "http://host:99999/a", "http://[::1/a"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"names no host|is no URL"):
        open_storage(url)


def test_a_thread_keeps_its_connection_and_shares_it_with_no_other(server: FaultyServer, pictures: Path) -> None:
    place = open_storage(server.url)
    names = names_below(pictures)[:5]
    both_have_one = threading.Barrier(2)
    failures = []

    def read_some() -> None:
        try:
            read(place, names[0])
            both_have_one.wait(10)
            for name in names:
                assert read(place, name) == (pictures / name).read_bytes()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=read_some) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len({port for _, port in server.requests}) == 2
    assert len(server.requests) == 2 * 6


def _read_in_child(place: Storage, name: str, pipe: Any) -> None:
    pipe.send(read(place, name))


def test_a_forked_process_opens_a_connection_of_its_own(server: FaultyServer, pictures: Path) -> None:
    place = open_storage(server.url)
    name = names_below(pictures)[0]
    content = read(place, name)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_read_in_child, args=(place, name, theirs))
    child.start()
    assert ours.recv() == content
    child.join()
    assert read(place, name) == content
    (_, before), (_, in_child), (_, after) = server.requests
    assert before == after != in_child


def test_a_pickled_storage_reads_by_connections_of_its_own(server: FaultyServer, pictures: Path) -> None:
    place = open_storage(server.url)
    name = names_below(pictures)[0]
    content = read(place, name)
    assert read(pickle.loads(pickle.dumps(place)), name) == content
    assert len({port for _, port in server.requests}) == 2


# Anything else


def test_fsspecs_protocols_are_known(memory: str, pictures: Path) -> None:
    for root in (memory, f"{memory}/"):
        place = open_storage(root)
        assert isinstance(place, FsspecFolder)
        assert the_same_content(place, pictures)
    assert the_same_content(pickle.loads(pickle.dumps(open_storage(memory))), pictures)


def test_what_fsspec_cannot_open_is_named(memory: str) -> None:
    with pytest.raises(UsageError, match=r"^memory://missing is not there, or not a folder$"):
        open_storage("memory://missing")
    with pytest.raises(BadFile, match=r"^memory://pictures/gone.jpg cannot be read: FileNotFoundError: "):
        open_storage(memory).open("gone.jpg")


@pytest.mark.parametrize("root", ["nonsense://bucket/faces", "smb2://host"])
def test_an_unknown_protocol_is_one_line(root: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_storage(root)
    assert str(refused.value).startswith(f"{root} cannot be opened by fsspec: Protocol not known")
    assert "\n" not in str(refused.value)


def _missing_plugin(*arguments: Any) -> Any:
    raise ImportError("Install s3fs to access S3")


def _no_access(*arguments: Any) -> Any:
    raise PermissionError("Access Denied")


@pytest.mark.parametrize(
    "failure, reason", [(_missing_plugin, "Install s3fs to access S3"), (_no_access, "Access Denied")]
)
def test_a_protocols_own_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, failure: Callable[..., Any], reason: str
) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", failure)
    with pytest.raises(UsageError, match=f"^s3://bucket/faces cannot be .*: {reason}$"):
        open_storage("s3://bucket/faces")


# The error


def test_a_bad_files_message_survives_the_stock_loaders_way_of_raising_it_again() -> None:
    """``DataLoader`` makes a new error, whose message is the worker's traceback."""
    text = (
        "Caught BadFile in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "storage.py", line 1, in open\ndataloading.storage.BadFile: a/b.jpg cannot be opened: why\n'
    )
    assert str(BadFile(text)) == str(BadFile("a/b.jpg cannot be opened: why")) == "a/b.jpg cannot be opened: why"
    assert str(pickle.loads(pickle.dumps(BadFile("a.jpg is empty")))) == "a.jpg is empty"
