"""ddp/checkpoint/checkpointer.py: a background save holds the state at the time of the call, and no error is lost."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from common.distributed.process_group import DistEnv, process_group
from common.errors import UsageError
from common.training.metrics import MetricsWriter
from ddp.checkpoint import checkpointer as saving
from ddp.checkpoint import list_checkpoints, storage
from ddp.checkpoint.checkpointer import Checkpointer
from ddp.checkpoint.state_copy import StateCopy
from ddp.checkpoint.storage import FOLDER, KINDS
from ddp.job import Job
from tests.ddp.checkpoint.samples import bits
from tests.ddp.checkpoint.test_state_copy import tree
from tests.ddp.jobs import newest, small, start
from tests.support.fake_gpu import CUDA, FakeGpu
from tests.support.launch import run_ranks

SETTINGS: dict[str, Any] = {"train_samples": 240, "test_samples": 20, "batch_size": 24, "keep_last": 2}
CANNOT = "cannot be written (File exists)"


class Saved(NamedTuple):
    """A checkpoint as it is read back: its facts without the settings, and its contents bit for bit."""

    facts: dict[str, Any]
    contents: Any


def saved(run_dir: Path, env: DistEnv) -> Saved | None:
    """The newest, on rank 0."""
    if not env.is_main:
        return None
    path, manifest = newest(run_dir)
    facts = {name: value for name, value in vars(manifest).items() if name != "config"}
    contents = {kind: storage.read(path, kind) for kind in KINDS}
    for rank in contents["ranks"]:
        rank["window"] = rank["window"][:3]  # the others are times
    return Saved(facts, bits(contents))


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


def overwrite(job: Job) -> None:
    """Change everything in place, as further training steps do."""
    with torch.no_grad():
        for tensor in job.network.state_dict().values():
            tensor.fill_(7)
        for state in job.optimizer.state.values():
            state["momentum_buffer"].fill_(7)
    job.step += 1
    job.skipped_steps += 1


def saved_both_ways(folder: Path) -> tuple[Saved | None, Saved | None, bool]:
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
            overwrite(job)
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
    assert at_once is not None and at_once.facts["step"] == 2
    assert all(rank[:2] == (None, None) for rank in others)  # rank 0 writes


def saved_one_after_another(folder: Path) -> tuple[list[int], bool]:
    """Three background saves, whose copies share one memory, and one save that is waited for."""
    with process_group(threads=1) as env:
        job, checkpointers, folders = started(folder, env)
        pointers = set()
        for _ in range(3):
            checkpointers[True].save(job)
            job.step += 1
            if env.is_main:
                copy = checkpointers[True]._copy
                assert copy is not None
                pointers |= {copy.read()["model"]["features.0.weight"].data_ptr()}
        checkpointers[True].save(job, wait=True)  # the previous one is completed first
        steps = [storage.verify(path).step for path in list_checkpoints(folders[True] / FOLDER)]
        with checkpointers[True]:
            job.step += 1
            checkpointers[True].save(job)
        finished = not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
        return steps, finished and len(pointers) == env.is_main


def test_saves_come_one_after_another_and_use_one_copy(tmp_path: Path) -> None:
    for steps, right in run_ranks(saved_one_after_another, 2, tmp_path):
        assert steps == [4, 5]  # of four, the last two are kept; they are on the disk when save returns
        assert right


def failing(folder: Path) -> list[str]:
    """What each call raises while the directory cannot be written; at the end it can."""
    with process_group(threads=1) as env:
        job, checkpointers, folders = started(folder, env)
        calls = [
            ("at once", lambda: checkpointers[False].save(job)),
            ("at once, after that", checkpointers[False].finish),
            ("in the background", lambda: checkpointers[True].save(job)),
            ("the next save", lambda: checkpointers[True].save(job)),
            ("nothing is left", checkpointers[True].finish),
            ("in the background again", lambda: checkpointers[True].save(job)),
            ("finish", checkpointers[True].finish),
            ("waited for", lambda: checkpointers[True].save(job, wait=True)),
        ]
        if env.is_main:
            for run_dir in folders.values():
                (run_dir / storage.FOLDER).write_text("a file, where the folder should be")
        said = [message_of(*call) for call in calls]
        with env.fail_together():
            if env.is_main:
                (folders[True] / storage.FOLDER).unlink()
        checkpointers[True].save(job)
        checkpointers[True].finish()
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
            f"waited for: {CANNOT}",
        ]


def env(rank: int) -> DistEnv:
    return DistEnv(rank, rank, 2, 2, torch.device("cpu"), "gloo", "host")


def checkpointer(tmp_path: Path, every: str, rank: int = 0) -> Checkpointer:
    return Checkpointer(
        small(checkpoint_every=every, run_dir=tmp_path), env(rank), MetricsWriter(tmp_path, silent=True)
    )


def test_checkpoints_are_due_every_n_steps(tmp_path: Path) -> None:
    by_steps, by_time = checkpointer(tmp_path, "3"), checkpointer(tmp_path, "2min")
    assert [step for step in range(1, 10) if by_steps.due(step)] == [3, 6, 9]
    assert not any(by_time.due(step) for step in range(1, 10))


def test_checkpoints_are_overdue_on_rank_0_after_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(saving.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    by_time, of_rank_1, by_steps = (
        checkpointer(tmp_path, "2min"),
        checkpointer(tmp_path, "2min", rank=1),
        checkpointer(tmp_path, "3"),
    )
    for now, overdue in ((1119.9, False), (1120.0, True), (5000.0, True)):  # noqa: B007 (the clock reads it)
        assert by_time.overdue() is overdue
        assert not of_rank_1.overdue() and not by_steps.overdue()


def test_on_a_gpu_the_writer_waits_for_the_copy_and_training_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu
) -> None:
    """On a (fake) GPU, the writing thread waits for the copy to the host; the training thread does not.

    A wait of the main thread, or a copy before the collective, which would wait for it, would be in the log.

    Claim (ddp/README.md, 9): on a GPU the writing thread waits for the copy, and training does not (a fake GPU).
    """

    @contextlib.contextmanager
    def collective(env: DistEnv) -> Iterator[None]:
        yield
        fake_gpu.log.append("the ranks meet")

    written: list[Any] = []
    state: dict[Any, Any] = {}
    monkeypatch.setattr(DistEnv, "fail_together", collective)
    monkeypatch.setattr(saving, "manifest_of", lambda job: None)
    monkeypatch.setattr(saving, "state_of_job", lambda job, ranks: state)
    monkeypatch.setattr(storage, "write", lambda run_dir, manifest, state: written.append(bits(state)))
    monkeypatch.setattr(Checkpointer, "_prune", lambda self, manifest: None)
    config = small(async_checkpoint=True, run_dir=tmp_path)
    checkpointer = Checkpointer(config, DistEnv.alone(CUDA), MetricsWriter(tmp_path, silent=True))
    job: Any = SimpleNamespace(user_error=None)
    for value in (1.0, 2.0):
        state = tree(value)
        fake_gpu.log.clear()
        checkpointer._write_on_rank_0(job, [], wait=False)
        checkpointer._join()
        copy = "copy on the computing stream"
        assert fake_gpu.log == ["the ranks meet", *[copy] * 4, "checkpoint_0 waits for the computing stream"]
    assert written == [bits(tree(1.0)), bits(tree(2.0))]
    assert fake_gpu.ever_pinned == 4  # the memory of the first is the second's


@pytest.mark.gpu
def test_a_background_save_on_a_gpu_holds_the_state_at_the_time_of_the_call() -> None:
    """The device is behind when the copy is taken, and then overwrites everything."""
    copy, weights = StateCopy(CUDA), torch.zeros(1 << 22, device=CUDA)
    for step in range(1, 4):
        torch.cuda._sleep(50_000_000)
        weights.add_(1)
        copy.make_room({"model": {"w": weights}})
        copy.take({"model": {"w": weights}})
        weights.mul_(-1)
        assert copy.read()["model"]["w"].is_pinned()
        assert (copy.read()["model"]["w"] == step).all()
        weights.mul_(-1)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.0}, {"optimizer": "adamw"}, {"strategy": "zero3", "optimizer": "adam"}]
)
def test_the_disk_is_looked_at_before_the_first_step(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The size that a run expects is that of its checkpoint, to 30 KB; a disk with less is refused before the first step.

    Claim (ddp/README.md, 9): when a run starts, it looks whether the disk has room for its checkpoints.
    """
    with process_group(threads=1) as env:
        config = small(**SETTINGS, **settings, run_dir=tmp_path)
        job, _ = start(config, env, steps=1)

        def refused_with(free: int) -> bool:
            monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
            with contextlib.suppress(UsageError):
                saving.require_room(job)
                return False
            return True

        Checkpointer(config, env, MetricsWriter(tmp_path, silent=True)).save(job)
        (path,) = list_checkpoints(tmp_path / FOLDER)
        size = sum(file.stat().st_size for file in path.iterdir())
        assert [refused_with(size - 30_000), refused_with(size)] == [True, False]
        assert re.search(r"MB free, and a checkpoint takes [\d.]+; a run keeps up to 4 at a time", caplog.text)
        caplog.clear()
        assert not refused_with(3 * size)  # one is there
        assert caplog.text == ""
