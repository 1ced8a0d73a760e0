"""common/files/atomic_files.py: a reader finds the old file or the new one, and no scratch file is left."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from common.files.atomic_files import SCRATCH, atomic_file, new_file, write_bytes, write_json


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_json_is_readable_and_names_paths_as_text(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"seed": 0, "run_dir": Path("runs/one")})
    text = (tmp_path / "config.json").read_text()
    assert json.loads(text) == {"seed": 0, "run_dir": "runs/one"}
    assert text.endswith("}\n")


def test_bytes_are_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pt"
    write_bytes(path, b"old")
    write_bytes(path, memoryview(b"new"))
    assert content(tmp_path) == {"model.pt": b"new"}

    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"newer")
    assert content(tmp_path) == {"model.pt": b"new"}


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"old")
    with contextlib.suppress(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"new")
        (scratch,) = (name for name in os.listdir(tmp_path) if name != path.name)
        assert SCRATCH.fullmatch(scratch)
        raise KeyboardInterrupt
    assert content(tmp_path) == {"weights.pt": b"old"}


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"old")
    with pytest.raises(FileExistsError), new_file(tmp_path / "weights.pt"):
        pass
    assert content(tmp_path) == {"weights.pt": b"old"}
