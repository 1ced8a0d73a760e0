"""ddp/checkpoint/checkpointer.py: a background save holds the state at the time of the call, and no error is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.training.metrics import MetricsWriter
from ddp.checkpoint import checkpointer as saving
from ddp.checkpoint import list_checkpoints, storage
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.checkpoint.storage import FOLDER, KINDS
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from tests.ddp.checkpoint.samples import bits
from tests.ddp.jobs import newest, small, start
from tests.support.launch import run_ranks

SETTINGS: dict[str, Any] = {"train_samples": 240, "test_samples": 20, "batch_size": 24, "keep_last": 2}
CANNOT = "cannot be written (File exists)"


def saved(run_dir: Path, env: DistEnv) -> Any:
    """The newest checkpoint on rank 0: its facts without the settings, and its contents bit for bit."""
    if not env.is_main:
        return None
    path, manifest = newest(run_dir)
    facts = {name: value for name, value in vars(manifest).items() if name != "config"}
    contents = {kind: storage.read(path, kind) for kind in KINDS}
    for rank in contents["ranks"]:
        rank["window"] = rank["window"][:3]  # the others are times
    return facts, bits(contents)


class Started(NamedTuple):
    job: Job
    checkpointers: dict[bool, Checkpointer]
    folders: dict[bool, Path]


def started(folder: Path, env: DistEnv) -> Started:
    """A job after two steps; a checkpointer that waits (False) and one that does not (True), each with a run directory."""
    folders = {later: folder / f"async-{later}" for later in (False, True)}
    checkpointers = {}
    for later, run_dir in folders.items():
        if env.is_main:
            run_dir.mkdir()
        config = small(**SETTINGS, run_dir=run_dir, async_checkpoint=later)
        checkpointers[later] = Checkpointer(config, env, MetricsWriter(run_dir, silent=not env.is_main))
    job, _ = start(config, env, steps=2)
    return Started(job, checkpointers, folders)


def saved_both_ways(folder: Path) -> tuple[Any, Any, bool]:
    """The same state, saved at once, and in the background by a thread that starts after everything has changed."""
    with process_group(threads=1) as env:
        job, checkpointers, folders = started(folder, env)
        checkpointers[False].save(job)
        go_on = threading.Event()

        def late(*arguments: Any) -> Path:
            assert go_on.wait(60)
            return write(*arguments)

        write = storage.write
        with mock.patch.object(storage, "write", late):
            checkpointers[True].save(job)
            nothing_yet = storage.newest(folders[True]) is None
            with torch.no_grad():  # everything in place, as further steps do
                for tensor in job.network.state_dict().values():
                    tensor.fill_(7)
                for state in job.optimizer.state.values():
                    state["momentum_buffer"].fill_(7)
            job.step += 1
            job.skipped_steps += 1
            go_on.set()
            checkpointers[True].finish()
        return saved(folders[False], env), saved(folders[True], env), nothing_yet


def test_a_background_save_holds_the_state_at_the_time_of_the_call(tmp_path: Path) -> None:
    """A background save holds the state at the time of the call.

    Claim (ddp/README.md, 9): a checkpoint that is written in the background holds the state at the time of the call.
    """
    (at_once, later, nothing_yet), *others = run_ranks(saved_both_ways, 2, tmp_path)
    assert nothing_yet
    assert at_once == later
    assert at_once[0]["step"] == 2
    assert all(rank[:2] == (None, None) for rank in others)  # rank 0 writes


def saved_one_after_another(folder: Path) -> tuple[list[int], bool]:
    """Three background saves, and one save that is waited for."""
    with process_group(threads=1) as env:
        job, checkpointers, folders = started(folder, env)
        for wait in (False, False, False, True):
            checkpointers[True].save(job, wait=wait)  # the previous one is completed first
            job.step += not wait
        steps = [storage.verify(path).step for path in list_checkpoints(folders[True] / FOLDER)]
        with checkpointers[True]:
            checkpointers[True].save(job)
        return steps, not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())


def test_saves_come_one_after_another(tmp_path: Path) -> None:
    for steps, finished in run_ranks(saved_one_after_another, 2, tmp_path):
        assert steps == [4, 5]  # of four, the last two are kept; they are on the disk when save returns
        assert finished


def failing(folder: Path) -> list[str]:
    """The error of each call while the directory cannot be written; at the end it can."""
    with process_group(threads=1) as env:
        job, checkpointers, folders = started(folder, env)
        at_once, later = checkpointers[False], checkpointers[True]
        calls = [
            ("at once", lambda: at_once.save(job)),
            ("at once, after that", at_once.finish),
            ("in the background", lambda: later.save(job)),
            ("the next save", lambda: later.save(job)),
            ("nothing is left", later.finish),
            ("in the background again", lambda: later.save(job)),
            ("finish", later.finish),
        ]
        if env.is_main:
            for run_dir in folders.values():
                (run_dir / storage.FOLDER).write_text("a file, where the folder should be")
        said = [message_of(what, call) for what, call in calls]
        with env.fail_together():
            if env.is_main:
                (folders[True] / storage.FOLDER).unlink()
        later.save(job, wait=True)
        newest(folders[True])
        return said


def message_of(what: str, call: Any) -> str:
    try:
        call()
    except UsageError as error:
        return f"{what}: {CANNOT if CANNOT in str(error) and error.seen_by_all else error}"
    return what


def test_an_error_of_the_writer_is_raised_on_every_rank_once(tmp_path: Path) -> None:
    for said in run_ranks(failing, 2, tmp_path):
        assert said == [
            f"at once: {CANNOT}",
            "at once, after that",
            "in the background",
            f"the next save: {CANNOT}",
            "nothing is left",
            "in the background again",
            f"finish: {CANNOT}",
        ]


def test_checkpoints_are_due_after_steps_on_every_rank_or_after_a_time_on_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checkpointer(every: str, rank: int = 0) -> Checkpointer:
        config, env = small(checkpoint_every=every, run_dir=tmp_path), DistEnv.alone(torch.device("cpu"))
        return Checkpointer(config, dataclasses.replace(env, rank=rank), MetricsWriter(tmp_path, silent=True))

    now = 1000.0
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    by_steps, by_time, of_rank_1 = checkpointer("3"), checkpointer("2min"), checkpointer("2min", rank=1)
    assert [step for step in range(1, 10) if by_steps.due(step)] == [3, 6, 9]
    assert not any(by_time.due(step) for step in range(1, 10))
    for now, overdue in ((1119.9, False), (1120.0, True), (5000.0, True)):
        assert (now >= by_time.due_at) is overdue
        assert now < of_rank_1.due_at and now < by_steps.due_at


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.0}, {"optimizer": "adamw"}, {"strategy": "zero3", "optimizer": "adam"}]
)
def test_the_disk_is_looked_at_before_the_first_step(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size that a run expects is that of its checkpoint, to 30 KB; a disk with less is refused before the first step.

    Claim (ddp/README.md, 9): when a run starts, it looks whether the disk has room for a checkpoint.
    """
    with process_group(threads=1) as env:
        config = small(**SETTINGS, **settings, run_dir=tmp_path)
        job, _ = start(config, env, steps=1)

        def is_refused_with(free: int) -> bool:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
            with contextlib.suppress(UsageError):
                saving.require_room(job)
                return False
            return True

        Checkpointer(config, env, MetricsWriter(tmp_path, silent=True)).save(job)
        (path,) = list_checkpoints(tmp_path / FOLDER)
        size = sum(file.stat().st_size for file in path.iterdir())
        assert [is_refused_with(size - 30_000), is_refused_with(size)] == [True, False]
