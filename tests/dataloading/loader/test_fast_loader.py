"""``FastLoader`` and its worker pools: the interface, the ownership of batches' memory, and that nothing is left behind.

test_batches.py tests that it gives the same batches as ``DataLoader``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pytest
import torch
from fsspec import AbstractFileSystem
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchvision.transforms import PILToTensor

from common.data.datasets import Batch, BatchKey
from common.errors import UsageError
from dataloading.dataset.batches import LFWBatches, ThreadedFetch
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import SampleKey, ShuffledBatches, ShuffledSampler
from dataloading.dataset.storage import BadFile
from dataloading.loader import buffers, worker_pool
from dataloading.loader.fast_loader import FastLoader
from tests.dataloading.conftest import PICTURES
from tests.dataloading.faults import BATCH_SIZE, HEIGHT, WIDTH, Traces
from tests.support.fake_gpu import FakeGpu
from tests.support.launch import start_command

POOLS: dict[str, dict[str, Any]] = {
    "none": {"num_workers": 0},
    "threads": {"num_workers": 3, "pool": "threads"},
    "kept threads": {"num_workers": 3, "pool": "threads", "persistent_workers": True},
    "processes": {"num_workers": 2, "pool": "processes"},
    "kept processes": {"num_workers": 2, "pool": "processes", "persistent_workers": True},
}
every_pool = pytest.mark.parametrize("pool", POOLS)
processes_only = pytest.mark.parametrize("pool", ["processes", "kept processes"])


@pytest.fixture
def dataset(pictures: Path) -> LFWBatches:
    return LFWBatches(LFWDataset(pictures, seed=2))


def make(dataset: LFWBatches, pool: str, batch_size: int = BATCH_SIZE, **settings: Any) -> FastLoader:
    return FastLoader(dataset, batch_size, **(POOLS[pool] | settings))


def fresh(dataset: LFWBatches, samples: list[int], epoch: int = 0) -> Batch:
    """A batch decoded again, into its own memory."""
    batch: Batch = dataset.__getitems__(BatchKey(epoch, np.array(samples, np.int64)))
    return batch


def assert_equal(batch: Batch, expected: Batch) -> None:
    assert torch.equal(batch.images, expected.images)
    assert torch.equal(batch.labels, expected.labels)


def loader_processes() -> list[int]:
    """The process ids of loader processes; other children of this process belong to multiprocessing."""
    children = sorted(multiprocessing.active_children(), key=lambda child: child.name)
    return [child.pid for child in children if child.name.startswith("fast-loader") and child.pid is not None]


# The interface


@every_pool
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_has_as_many_batches_as_it_says_in_the_order_of_the_samples(
    dataset: LFWBatches, pool: str, drop_last: bool
) -> None:
    loader = make(dataset, pool, drop_last=drop_last)
    sizes: list[int] = []
    for batch in loader:
        first = BATCH_SIZE * len(sizes)
        sizes.append(len(batch.labels))
        assert_equal(batch, fresh(dataset, list(range(first, first + sizes[-1]))))
    assert len(loader) == len(sizes) == 26 // 4 + (not drop_last)
    assert set(sizes[:-1]) == {BATCH_SIZE}
    assert sizes[-1] == (BATCH_SIZE if drop_last else 2)
    loader.close()


@every_pool
def test_every_epoch_has_its_own_order_and_augmentation_and_is_counted_unless_selected(
    pictures: Path, pool: str
) -> None:
    dataset = LFWBatches(LFWDataset(pictures, augmentation="affine", seed=4))
    loader = make(dataset, pool, PICTURES, shuffle=True)
    order = ShuffledSampler(PICTURES, seed=4).order
    for epoch in (0, 1, 7, 8):
        if epoch == 7:
            loader.set_epoch(7)
        (batch,) = loader
        assert_equal(batch, fresh(dataset, order(epoch), epoch))
    loader.close()


def test_a_transform_is_refused_and_not_ignored(pictures: Path) -> None:
    """A transform is refused and not ignored.

    Claim (dataloading/README.md, 6): both data sets work in torch's DataLoader; a transform is refused and not
    ignored.
    """
    with pytest.raises(
        ValueError, match="no image object that LFWDataset's transform could be called with: leave transform out"
    ):
        LFWBatches(LFWDataset(pictures, transform=np.asarray))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_torchs_loader_takes_any_of_the_data_sets(pictures: Path, workers: int, shuffle: bool) -> None:
    """torch's DataLoader takes any of the data sets, with its own sampler and ``collate_fn``.

    With nothing but a ``batch_size``: its own samplers and its own ``collate_fn``.

    Claim (dataloading/README.md, 6): both data sets work in torch's DataLoader; a transform is refused and not
    ignored.
    """
    files = LFWDataset(pictures, transform=PILToTensor())
    whole = LFWBatches(LFWDataset(pictures))
    for dataset in (files, whole, ThreadedFetch(files, 2)):
        loader, expected = (
            DataLoader(
                one, batch_size=5, num_workers=workers, shuffle=shuffle, generator=torch.Generator().manual_seed(0)
            )
            for one in (dataset, files)
        )
        for (images, labels), (same_images, same_labels) in zip(loader, expected, strict=True):
            assert torch.equal(images, same_images) and torch.equal(labels, same_labels)


SAMPLES = [[5, 3], [], [7], [1, 1, 2, 0]]


@every_pool
def test_a_batch_sampler_may_yield_batches_of_any_length_and_kind(pictures: Path, pool: str) -> None:
    """The epoch of a key counts, and other indices are of the loader's epoch."""
    dataset = LFWBatches(LFWDataset(pictures, augmentation="affine"))
    first, second, third, fourth = SAMPLES
    of_each_kind = [
        [SampleKey(6, sample) for sample in first],
        second,
        torch.tensor(third),
        BatchKey(6, np.array(fourth)),
    ]
    loader = make(dataset, pool, 1, batch_sampler=of_each_kind)
    loader.set_epoch(2)
    assert len(loader) == len(SAMPLES)
    for _ in range(2):
        for batch, samples, epoch in zip(loader, SAMPLES, (6, 2, 2, 6), strict=True):
            assert batch.images.shape == (len(samples), 3, HEIGHT, WIDTH)
            assert_equal(batch, fresh(dataset, samples, epoch))
    loader.close()


def test_an_epoch_that_is_set_later_is_for_the_next_iterator(pictures: Path) -> None:
    dataset = LFWBatches(LFWDataset(pictures, augmentation="affine"))
    loader = FastLoader(dataset, batch_sampler=[[3, 4], [5, 6]], num_workers=2, pool="threads")
    batches = iter(loader)
    loader.set_epoch(2)
    for epoch in (0, 2):
        for batch, samples in zip(batches, ([3, 4], [5, 6]), strict=True):
            assert_equal(batch, fresh(dataset, samples, epoch))
        batches = iter(loader)


def test_torchs_own_samplers_can_be_used(dataset: LFWBatches) -> None:
    for settings in (
        {"sampler": SequentialSampler(range(PICTURES)), "batch_size": 5},
        {"batch_sampler": BatchSampler(SequentialSampler(range(PICTURES)), 5, drop_last=False)},
        {"batch_sampler": ShuffledBatches(SequentialSampler(range(PICTURES)), 5)},
    ):
        loader = FastLoader(dataset, num_workers=2, pool="threads", **settings)
        assert len(loader) == 6
        assert torch.equal(torch.cat([batch.labels for batch in loader]), torch.from_numpy(dataset.labels))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler excludes batch_size"),
        ({"batch_sampler": [[0]], "shuffle": True}, "batch_sampler excludes batch_size"),
        ({"batch_sampler": [[0]], "sampler": [0]}, "batch_sampler excludes batch_size"),
        ({"batch_sampler": [[0]], "drop_last": True}, "batch_sampler excludes batch_size"),
        ({"sampler": [0], "shuffle": True}, "the sampler decides the order"),
        ({"pool": "robots"}, "there is no worker pool 'robots': auto, threads, processes"),
        ({"batch_size": 0}, "batch_size 0 is less than 1"),
        ({"num_workers": -1}, "num_workers -1 is less than 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    dataset: LFWBatches, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FastLoader(dataset, **settings)


@pytest.mark.parametrize(
    "settings, pool",
    [({}, "threads"), ({"augmentation": "affine"}, "processes"), ({"image_size": 16}, "processes")],
)
def test_processes_are_the_default_where_much_work_holds_the_gil(
    pictures: Path, settings: dict[str, Any], pool: str
) -> None:
    dataset = LFWBatches(LFWDataset(pictures, **settings))
    assert FastLoader(dataset).pool == pool
    assert FastLoader(dataset, pool="threads").pool == "threads"


def test_no_more_than_prefetch_batches_are_requested_ahead(dataset: LFWBatches) -> None:
    begun: list[int] = []

    def batches() -> Iterator[list[int]]:
        for sample in range(20):
            begun.append(sample)
            yield [sample]

    for ahead in (1, 4):
        begun.clear()
        loader = FastLoader(dataset, batch_sampler=batches(), num_workers=2, pool="threads", prefetch_batches=ahead)
        for number, _ in enumerate(loader):
            assert len(begun) == min(20, number + ahead)


# The memory of batches


@every_pool
def test_a_batch_that_is_kept_is_never_overwritten(dataset: LFWBatches, pool: str) -> None:
    """A batch that is kept is never overwritten.

    Claim (dataloading/README.md, 6): a batch that is kept is never overwritten; the buffers of dropped batches are
    reused.
    """
    loader = make(dataset, pool, shuffle=True)
    kept = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        kept.append(list(loader))
    assert len({batch.images.data_ptr() for batches in kept for batch in batches}) == 4 * len(loader)
    for epoch, batches in enumerate(kept):
        order = ShuffledSampler(PICTURES, seed=2).order(epoch)
        for number, batch in enumerate(batches):
            assert_equal(batch, fresh(dataset, order[number * BATCH_SIZE :][:BATCH_SIZE], epoch))
    loader.close()


@every_pool
def test_the_memory_of_dropped_batches_is_reused(dataset: LFWBatches, pool: str) -> None:
    """The memory of dropped batches is reused.

    Claim (dataloading/README.md, 6): a batch that is kept is never overwritten; the buffers of dropped batches are
    reused.
    """
    loader = make(dataset, pool, prefetch_batches=2)
    addresses = []
    for _ in range(5):
        for batch in loader:
            addresses.append(batch.images.data_ptr())
            del batch
    assert len(addresses) == 5 * len(loader)
    assert len(set(addresses)) <= 2 + 2  # the prefetched ones, the user's, and one that a thread is about to release
    loader.close()


@processes_only
def test_processes_unmap_memory_that_the_pool_no_longer_keeps(dataset: LFWBatches, pool: str) -> None:
    loader = make(dataset, pool, 2)
    for _ in range(3):
        held = list(loader)
        del held
    gc.collect()
    for number, _ in enumerate(loader):
        if number == len(loader) - 3:
            memory = loader._buffers
            assert isinstance(memory, buffers.BufferPool)
            assert memory._made > 2 * len(loader)
            for process in loader_processes():
                maps = Path(f"/proc/{process}/maps").read_text().count("/dev/shm/")
                assert maps <= 2 * (loader.prefetch_batches + 2)
    loader.close()


def test_full_shared_memory_is_one_line_and_leaves_nothing(
    dataset: LFWBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Traces()

    def refuse(shape: tuple[int, ...]) -> torch.Tensor:
        raise UsageError(f"shared memory is full: {shape}")

    monkeypatch.setattr("dataloading.loader.buffers.shared", refuse)
    loader = make(dataset, "processes")
    with pytest.raises(UsageError, match="shared memory is full"):
        next(iter(loader))
    assert Traces() == before


# Nothing is left behind


def _to_the_end(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def _break_early(batches: Iterator[Any]) -> None:
    for _ in batches:
        break


def _never_begin(batches: Iterator[Any]) -> None:
    pass


def _raise(batches: Iterator[Any]) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for _ in batches:
            raise ZeroDivisionError


def _meet_a_bad_file(batches: Iterator[Any]) -> None:
    try:
        _to_the_end(batches)
    except BadFile as error:
        traceback.clear_frames(error.__traceback__)


ENDS: list[Callable[[Iterator[Any]], None]] = [_to_the_end, _break_early, _never_begin, _raise]


@every_pool
def test_nothing_is_left_however_an_epoch_ends(dataset: LFWBatches, own_pictures: Path, pool: str) -> None:
    """No process or shared memory is left, however an epoch ends.

    Claim (dataloading/README.md, 8): no process or shared memory stays behind, however an epoch ends.
    """
    damaged = LFWBatches(LFWDataset(own_pictures))
    Path(damaged.files.path(6)).unlink()
    before = Traces()
    for end in (*ENDS, _meet_a_bad_file):
        loader = make(damaged if end is _meet_a_bad_file else dataset, pool)
        end(iter(loader))
        end(iter(loader))
        if "kept" in pool and end is not _meet_a_bad_file:  # an error ends the pool
            loader.close()
        during = Traces()
        assert (during.threads, during.children) == (before.threads, before.children), end
        del loader
    assert Traces() == before


@pytest.mark.parametrize("pool", ["kept threads", "kept processes"])
@pytest.mark.parametrize("close", [True, False])
def test_a_persistent_pool_stays_until_it_is_closed_or_its_loader_is_freed(
    dataset: LFWBatches, pool: str, close: bool
) -> None:
    before = Traces()
    loader = make(dataset, pool)
    assert Traces() == before
    _to_the_end(iter(loader))
    between = Traces()
    assert between != before
    _to_the_end(iter(loader))
    after = Traces()
    assert (after.threads, after.children) == (between.threads, between.children)
    if close:
        loader.close()
        loader.close()
        during = Traces()
        assert (during.threads, during.children) == (before.threads, before.children)
        _to_the_end(iter(loader))
        loader.close()
    del loader
    assert Traces() == before


@every_pool
def test_two_epochs_at_once_do_not_disturb_each_other(dataset: LFWBatches, pool: str) -> None:
    before = Traces()
    loader = make(dataset, pool)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    first.close()  # type: ignore[attr-defined]
    assert sum(len(batch.labels) for batch in second) == PICTURES - BATCH_SIZE
    for batch, other in zip(loader, loader, strict=True):
        assert_equal(batch, other)
    del batch, other, first, second
    loader.close()
    del loader
    assert Traces() == before


# Processes and signals


def kill(process: int, number: signal.Signals) -> int:
    """Kill a process and wait for its end, but leave its exit status to its parent."""
    os.kill(process, number)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    return process


def error_of(batches: Iterator[Any]) -> str:
    try:
        _to_the_end(batches)
    except UsageError as error:
        traceback.clear_frames(error.__traceback__)
        return str(error)
    raise AssertionError("the epoch came to its end")


@pytest.mark.faults
@pytest.mark.timeout(60)
@processes_only
def test_a_loader_process_that_is_killed_is_named_with_the_likely_reason(dataset: LFWBatches, pool: str) -> None:
    """A loader process that is killed is named with the likely reason.

    Claim (dataloading/README.md, 8): a killed loader process is named.
    """
    before = Traces()
    loader = make(dataset, pool, 1)
    batches = iter(loader)
    next(batches)
    victim = kill(loader_processes()[-1], signal.SIGKILL)
    message = error_of(batches)
    assert f"(pid {victim}) died of SIGKILL: the kernel does this when memory runs out (see dmesg)" in message
    assert "\n" not in message
    del batches
    _to_the_end(iter(loader))  # and the next epoch has a new pool
    loader.close()
    del loader
    assert Traces() == before


def _end_by(number: signal.Signals) -> None:
    faulthandler.disable()  # pytest's, which would report it
    os.kill(os.getpid(), number)


def test_full_shared_memory_is_reported_as_the_likely_reason_of_a_process_s_end() -> None:
    process = multiprocessing.get_context("fork").Process(target=_end_by, args=(signal.SIGBUS,), name="fast-loader-3")
    process.start()
    message = str(worker_pool._death(process))
    reason = "died of SIGBUS: shared memory ran out (df /dev/shm); make it larger"
    assert message.startswith(f"loader process fast-loader-3 (pid {process.pid}) {reason}")


def _break_down(*arguments: Any) -> None:
    raise ZeroDivisionError("inside")


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_program_error_keeps_its_traceback(dataset: LFWBatches, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LFWDataset, "pixels_into", _break_down)
    with pytest.raises((ZeroDivisionError, RuntimeError)) as error:
        next(iter(make(dataset, pool)))
    if pool == "processes":
        assert "in a loader process:\nTraceback" in str(error.value)
        assert "in _break_down" in str(error.value)
        assert "ZeroDivisionError: inside" in str(error.value)
    else:
        assert error.traceback[-1].name == "_break_down"


def test_processes_end_in_spite_of_an_inherited_handler_of_sigterm(dataset: LFWBatches) -> None:
    """A training job has one, to save a checkpoint first."""
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        for _ in range(5):
            pool = worker_pool.ProcessPool(dataset, 2, "fork")
            pool.close()  # possibly before they reset the handler
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert loader_processes() == []


@pytest.mark.faults
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "loader, processes",
    [
        ("fast-3-threads", 0),
        ("fast-2-processes", 4),  # with the fork server and multiprocessing's resource tracker
        ("fast-3-kept-processes", 3),
        ("stock-2-threaded-fetch", 2),
    ],
)
def test_after_ctrl_c_nothing_is_left(pictures: Path, loader: str, processes: int) -> None:
    with start_command("tests.dataloading.faults", loader, str(pictures)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a batch\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == processes
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=50)
        assert process.returncode == -signal.SIGINT
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert err.count("Traceback") == 1
        _, alive = psutil.wait_procs(below, timeout=10)
        assert not alive


@pytest.mark.faults
@pytest.mark.timeout(90)
@pytest.mark.parametrize("loader", ["fast-3-kept-processes", "fast-2-processes"])
def test_processes_end_when_their_parent_is_killed(pictures: Path, loader: str) -> None:
    with start_command("tests.dataloading.faults", loader, str(pictures)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "a batch\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        process.kill()
        _, alive = psutil.wait_procs(below, timeout=30)
        assert not alive


def _serve_and_check_often(pipe: Any, checked: Any, dataset: LFWBatches) -> None:
    """A loader process that checks for its parent all the time, and reports each check."""
    worker_pool.PARENT_CHECK_S = 0.001
    getppid = os.getppid

    def check_and_report() -> int:
        checked.release()
        return getppid()

    os.getppid = check_and_report
    worker_pool._serve(pipe, dataset)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_process_that_waits_for_work_stays_as_long_as_its_parent(dataset: LFWBatches, start_method: str) -> None:
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe()
    checked = context.Semaphore(0)
    process = context.Process(target=_serve_and_check_often, args=(theirs, checked, dataset), daemon=True)
    process.start()
    theirs.close()
    for _ in range(5):
        assert checked.acquire(timeout=50)
    assert process.is_alive()
    process.kill()
    process.join()
    ours.close()


# On a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line(dataset: LFWBatches) -> None:
    for device in ("cuda", "cuda:1", "meta"):
        with pytest.raises(UsageError, match=f"^device {device} is not there: give one that is, or leave it out"):
            FastLoader(dataset, device=device)
    assert FastLoader(dataset, device="cpu").device is None


@every_pool
@pytest.mark.parametrize("end", [_to_the_end, _break_early])
def test_what_lies_on_a_gpu_is_right_though_copies_run_late(
    dataset: LFWBatches, pool: str, end: Callable[[Iterator[Any]], None], fake_gpu: FakeGpu
) -> None:
    """Batches on a (fake) GPU are right though its copies run late.

    Workers fill the memory of a batch again as soon as its copy is over, and not before.

    Claim (dataloading/README.md, 6): copies to a GPU are queued and waited for by events, and no buffer is reused
    before its copy is over (a fake GPU, whose copies run late).
    """
    before = Traces()
    loader = make(dataset, pool, 2, prefetch_batches=1, device="cuda")
    arrived: list[Batch] = []

    def keeping(batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            arrived.append(batch)
            yield batch

    for _ in range(3):
        end(keeping(iter(loader)))
        gc.collect()
    fake_gpu.finish()
    in_order = range(0, PICTURES, 2) if end is _to_the_end else [0]
    assert len(arrived) == 3 * len(in_order)
    for start, batch in zip([*in_order] * 3, arrived, strict=True):
        assert_equal(batch, fresh(dataset, [start, start + 1]))
    assert fake_gpu.ever_locked == (0 if "processes" not in pool else len(fake_gpu.locked))
    loader.close()
    del loader
    assert not fake_gpu.locked
    assert Traces() == before


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["none", "threads", "processes"])
def test_batches_on_a_gpu_are_right_though_it_is_steps_behind(dataset: LFWBatches, pool: str) -> None:
    arrived = []
    for batch in make(dataset, pool, 2, prefetch_batches=1, device="cuda"):
        torch.cuda._sleep(20_000_000)
        arrived.append(Batch(batch.images.clone(), batch.labels.clone()))
    for number, batch in enumerate(arrived):
        assert batch.images.device.type == "cuda"
        assert_equal(Batch(batch.images.cpu(), batch.labels.cpu()), fresh(dataset, [2 * number, 2 * number + 1]))


class ShyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Local files, but not fork-safe, like the plugins for object stores."""

    protocol = "shy"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.process = os.getpid()

    def isdir(self, path: str) -> bool:
        return os.path.isdir(path)

    def find(self, path: str, **settings: Any) -> list[str]:
        return [str(image) for image in Path(path).rglob("*.jpg")]

    def cat_file(self, path: str, **settings: Any) -> bytes:
        assert os.getpid() == self.process, "not fork-safe"
        return Path(path).read_bytes()


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_a_plugin_that_is_not_fork_safe_is_created_again(pictures: Path, pool: str) -> None:
    fsspec.register_implementation("shy", ShyFileSystem, clobber=True)
    shy, local = LFWDataset(f"shy://{pictures}"), LFWDataset(pictures)
    batches = FastLoader(LFWBatches(shy), 5, num_workers=2, pool=pool)
    for batch, expected in zip(batches, FastLoader(LFWBatches(local), 5, num_workers=0), strict=True):
        assert torch.equal(batch.images, expected.images)
