"""ddp/checkpoint: a full disk, a kill or a stop signal in the middle of a save loses no earlier checkpoint."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from common.errors import UsageError
from common.files import atomic_files
from common.signals.stop_request import stop_signals
from ddp.checkpoint import clean, list_checkpoints, prune, storage
from ddp.checkpoint.storage import FOLDER
from tests.ddp.checkpoint.samples import (
    NEWER,
    assert_is,
    in_a_process,
    litter,
    write,
)
from tests.support.launch import FORK_SERVER


class Failing:
    """Counts writes, syncs, renames and new folders of a checkpoint, and fails at the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail_at: int, error: OSError) -> None:
        self.calls, self._fail_at, self._error = 0, fail_at, error
        monkeypatch.setattr(atomic_files, "open", self._open, raising=False)
        for name in ("fsync", "rename"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))
        monkeypatch.setattr(Path, "mkdir", self._counted(Path.mkdir))

    def _open(self, path: Path, mode: str) -> Any:
        file = open(path, mode)  # noqa: SIM115
        return _FailingFile(file, self._counted(file.write))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._fail_at:
                raise self._error
            return function(*arguments, **options)

        return call


class _FailingFile:
    def __init__(self, file: Any, write: Callable[..., Any]) -> None:
        self._file, self.write = file, write

    def __enter__(self) -> _FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("replacing", [pytest.param(False, marks=pytest.mark.faults), True])
def test_a_full_disk_at_any_write_leaves_what_was_there(tmp_path: Path, replacing: bool) -> None:
    """A full disk at any write, sync, rename or new folder leaves the checkpoints that were there.

    Also at any sync, rename and new folder.

    Claim (ddp/README.md, 9): a checkpoint is complete or absent, at a kill in any moment and on a full disk.
    """
    older = write(tmp_path, 10)
    if replacing:
        write(tmp_path, 20)
    full = f"{tmp_path / FOLDER / NEWER} cannot be written (No space left on device): make room, then continue with --resume"
    failures = 0
    while (failure := failure_at(failures + 1, tmp_path)) is not None:
        failures += 1
        assert failure == full
        assert not litter(tmp_path)
        assert_is(older, 10)
        if replacing:
            assert_is(tmp_path / FOLDER / NEWER, 20)
        else:
            shutil.rmtree(tmp_path / FOLDER / NEWER, ignore_errors=True)  # if only the last sync has failed
    assert failures > 60
    assert_is(tmp_path / FOLDER / NEWER, 20)


def failure_at(call: int, run_dir: Path) -> str | None:
    """Write a checkpoint on a disk that is full at the n-th call: the error, or None when there are fewer calls."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        failing = Failing(monkeypatch, call, OSError(28, "No space left on device"))
        try:
            write(run_dir, 20)
        except UsageError as error:
            return str(error)
    assert failing.calls < call  # no failure is ignored
    return None


def _write_for_ever(run_dir: Path, sender: Connection) -> None:
    """A run that continues from its newest checkpoint, sends each step that it has saved, and saves every third twice."""
    clean(run_dir / FOLDER)
    found = storage.newest(run_dir)
    step = found[1].step if found else 0
    while True:
        step += 1
        for _ in range(2 if step % 3 == 0 else 1):
            write(run_dir, step)
            sender.send(step)
        prune(run_dir / FOLDER, 2)


@pytest.mark.parametrize("kills", [6, pytest.param(30, marks=pytest.mark.faults)])
def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path, kills: int) -> None:
    """A kill at any system call of a save leaves the old checkpoint or the new one.

    Claim (ddp/README.md, 9): a checkpoint is complete or absent, at a kill in any moment and on a full disk.
    """
    moments = random.Random(0)
    seen: set[str] = set()
    for _ in range(kills):
        receiver, sender = FORK_SERVER.Pipe(duplex=False)
        with receiver:
            process = FORK_SERVER.Process(target=_write_for_ever, args=(tmp_path, sender))
            process.start()
            sender.close()
            try:
                sent = receiver.recv()
                time.sleep(moments.uniform(0, 0.05))
            finally:
                process.kill()
                process.join()
            with contextlib.suppress(EOFError):
                while True:
                    sent = receiver.recv()
        seen |= {name.split("-")[0] for name in litter(tmp_path)}
        before = storage.newest(tmp_path)
        assert before is not None
        clean(tmp_path / FOLDER)
        assert not litter(tmp_path)
        after = storage.newest(tmp_path)
        assert after is not None
        assert after[1].step >= max(sent, before[1].step)
        for path in list_checkpoints(tmp_path / FOLDER):
            assert_is(path, int(path.name[-8:]))
    assert seen  # some kills interrupted a save or a removal


class _StoppedFile(_FailingFile):
    """SIGTERM arrives at the n-th write of each file, while torch's C++ is below us."""

    stop_at = 0

    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(open(path, mode), self._write)  # noqa: SIM115
        self._writes = 0

    def _write(self, data: memoryview) -> Any:
        self._writes += 1
        if self._writes == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return self._file.write(data)


def _stopped_at_every_write(run_dir: Path) -> list[tuple[str, list[str]]]:
    atomic_files.open = _StoppedFile  # type: ignore[attr-defined]
    results = []
    for stop_at in range(1, 25):
        _StoppedFile.stop_at = stop_at
        try:
            with stop_signals():
                write(run_dir, 20)
        except BaseException as error:
            results.append((repr(error), litter(run_dir)))
    return results


def test_a_stop_signal_within_torch_save_is_no_error_of_torch(tmp_path: Path) -> None:
    older = write(tmp_path, 10)
    results = in_a_process(_stopped_at_every_write, tmp_path)
    assert results == [(f"SystemExit({128 + signal.SIGTERM})", [])] * 24
    assert_is(older, 10)
    assert list_checkpoints(tmp_path / FOLDER) == [older]
