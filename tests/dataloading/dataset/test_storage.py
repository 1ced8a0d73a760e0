"""``dataloading.dataset.storage``: the same names and bytes of a folder, and errors that name it."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from common.errors import UsageError
from dataloading.dataset.storage import BadFile, LocalFolder, Storage, is_image


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.jpg"))


def the_same_content(place: Storage, folder: Path) -> bool:
    names = sorted(place.names())
    return names == names_below(folder) and all(place.read(name) == (folder / name).read_bytes() for name in names)


# A local folder


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


def test_a_folder_that_cannot_be_listed_is_named(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path == str(own_pictures):
            return scandir(path)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UsageError, match=rf"^{own_pictures}/\w+ cannot be listed: Permission denied$"):
        LocalFolder(str(own_pictures)).names()


@pytest.mark.parametrize("link", ["Ann/2.jpg", "Bob/1.jpg", "2.jpg", "Cy"])
@pytest.mark.parametrize("hard", [False, True])
def test_a_file_or_folder_that_is_there_twice_is_named(tmp_path: Path, link: str, hard: bool) -> None:
    """It would count twice, perhaps for training and for testing."""
    for name in ("Ann/1.jpg", "Bob/0.jpg", "0.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "other.jpg").symlink_to("nowhere.jpg")  # read() reports it
    first, second = (tmp_path / "Ann" if link == "Cy" else tmp_path / "Ann/1.jpg"), tmp_path / link
    if hard and link != "Cy":
        second.hardlink_to(first)
    else:
        second.symlink_to(first)
    paths = {f"{first}/1.jpg", f"{second}/1.jpg"} if link == "Cy" else {str(first), str(second)}
    with pytest.raises(UsageError) as refused:
        LocalFolder(str(tmp_path)).names()
    one, other = str(refused.value).partition(", by a link")[0].split(" is the same as ")
    assert {one, other} == paths


def test_a_file_that_cannot_be_opened_or_read_is_named(own_pictures: Path) -> None:
    (own_pictures / "round.jpg").symlink_to("round.jpg")
    (own_pictures / "folder.jpg").mkdir()
    place = LocalFolder(str(own_pictures))
    for name, reason in {
        "gone.jpg": "cannot be opened: No such file or directory",
        "round.jpg": "cannot be opened: Too many levels of symbolic links",
        "folder.jpg": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(BadFile) as bad:
            place.read(name)
        assert str(bad.value) == f"{own_pictures / name} {reason}"


def test_a_file_that_is_too_long_for_an_image_is_not_read(own_pictures: Path) -> None:
    with open(own_pictures / "long.jpg", "wb") as file:
        file.truncate(10**12)  # sparse
    with pytest.raises(BadFile, match=r"long\.jpg has 1,000,000,000,000 bytes, and an image may have 100,000,000"):
        LocalFolder(str(own_pictures)).read("long.jpg")


def test_a_file_that_comes_in_pieces_is_read_whole(own_pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, n: whole_read(descriptor, min(n, 100)))
    assert the_same_content(LocalFolder(str(own_pictures)), own_pictures)


# The error


def test_a_bad_files_message_survives_a_dataloaders_way_of_raising_it_again() -> None:
    """``DataLoader`` makes a new error, whose message is the worker's traceback."""
    text = (
        "Caught BadFile in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "storage.py", line 1, in open\ndataloading.storage.BadFile: a/b.jpg cannot be opened: why\n'
    )
    assert str(BadFile(text)) == str(BadFile("a/b.jpg cannot be opened: why")) == "a/b.jpg cannot be opened: why"
    assert str(pickle.loads(pickle.dumps(BadFile("a.jpg is empty")))) == "a.jpg is empty"
