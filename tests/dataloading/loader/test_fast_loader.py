"""``FastLoader``: the interface, the ownership of batches' memory, and that nothing is left behind.

test_batches.py tests that it gives the same batches as ``DataLoader``.
"""

from __future__ import annotations

import gc
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from torchvision.transforms import PILToTensor

from common.data.datasets import Batch, BatchKey
from common.errors import UsageError
from dataloading.dataset.batches import ImageBatches, ThreadedFetch
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.sampler import SampleKey, ShuffledSampler
from dataloading.dataset.storage import BadFile
from dataloading.loader.fast_loader import FastLoader
from tests.dataloading.conftest import PICTURES
from tests.dataloading.faults import BATCH_SIZE, HEIGHT, WIDTH, Traces
from tests.support.fake_gpu import FakeGpu
from tests.support.launch import start_command

every_number = pytest.mark.parametrize("workers", [0, 3])


@pytest.fixture
def dataset(pictures: Path) -> ImageBatches:
    return ImageBatches(ImageFiles(pictures, seed=2))


def make(dataset: ImageBatches, workers: int, batch_size: int = BATCH_SIZE, **settings: Any) -> FastLoader:
    return FastLoader(dataset, batch_size, num_workers=workers, **settings)


def fresh(dataset: ImageBatches, samples: list[int], epoch: int = 0) -> Batch:
    """A batch decoded again, into its own memory."""
    batch: Batch = dataset.__getitems__(BatchKey(epoch, np.array(samples, np.int64)))
    return batch


def assert_equal(batch: Batch, expected: Batch) -> None:
    assert torch.equal(batch.images, expected.images)
    assert torch.equal(batch.labels, expected.labels)


# The interface


@every_number
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_has_as_many_batches_as_it_says_in_the_order_of_the_samples(
    dataset: ImageBatches, workers: int, drop_last: bool
) -> None:
    loader = make(dataset, workers, drop_last=drop_last)
    sizes: list[int] = []
    for batch in loader:
        first = BATCH_SIZE * len(sizes)
        sizes.append(len(batch.labels))
        assert_equal(batch, fresh(dataset, list(range(first, first + sizes[-1]))))
    assert len(loader) == len(sizes) == 26 // 4 + (not drop_last)
    assert set(sizes[:-1]) == {BATCH_SIZE}
    assert sizes[-1] == (BATCH_SIZE if drop_last else 2)


@every_number
def test_every_epoch_has_its_own_order_and_augmentation_and_is_counted_unless_selected(
    pictures: Path, workers: int
) -> None:
    dataset = ImageBatches(ImageFiles(pictures, augmentation="affine", seed=4))
    loader = make(dataset, workers, PICTURES, shuffle=True)
    order = ShuffledSampler(PICTURES, seed=4).order
    for epoch in (0, 1, 7, 8):
        if epoch == 7:
            loader.set_epoch(7)
        (batch,) = loader
        assert_equal(batch, fresh(dataset, order(epoch), epoch))


def test_a_transform_is_refused_and_not_ignored(pictures: Path) -> None:
    """A transform is refused and not ignored.

    Claim (dataloading/README.md, 6): both data sets work in torch's DataLoader; a transform is refused and not
    ignored.
    """
    with pytest.raises(
        ValueError, match="no image object that the files' transform could be called with: leave transform out"
    ):
        ImageBatches(ImageFiles(pictures, transform=np.asarray))


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_loader_takes_any_of_the_data_sets(pictures: Path, workers: int) -> None:
    """torch's DataLoader takes any of the data sets, with its own sampler and ``collate_fn``.

    Claim (dataloading/README.md, 6): both data sets work in torch's DataLoader; a transform is refused and not
    ignored.
    """
    files = ImageFiles(pictures, transform=PILToTensor())
    whole = ImageBatches(ImageFiles(pictures))
    for dataset in (files, whole, ThreadedFetch(files, 2)):
        loader, expected = (DataLoader(one, batch_size=5, num_workers=workers) for one in (dataset, files))
        for (images, labels), (same_images, same_labels) in zip(loader, expected, strict=True):
            assert torch.equal(images, same_images) and torch.equal(labels, same_labels)


SAMPLES = [[5, 3], [], [7], [1, 1, 2, 0]]


@every_number
def test_a_batch_sampler_may_yield_batches_of_any_length_and_kind(pictures: Path, workers: int) -> None:
    """The epoch of a key counts, and other indices are of the loader's epoch."""
    dataset = ImageBatches(ImageFiles(pictures, augmentation="affine"))
    first, second, third, fourth = SAMPLES
    of_each_kind = [
        [SampleKey(6, sample) for sample in first],
        second,
        torch.tensor(third),
        BatchKey(6, np.array(fourth)),
    ]
    loader = make(dataset, workers, 1, batch_sampler=of_each_kind)
    loader.set_epoch(2)
    assert len(loader) == len(SAMPLES)
    for _ in range(2):
        for batch, samples, epoch in zip(loader, SAMPLES, (6, 2, 2, 6), strict=True):
            assert batch.images.shape == (len(samples), 3, HEIGHT, WIDTH)
            assert_equal(batch, fresh(dataset, samples, epoch))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler excludes batch_size"),
        ({"batch_sampler": [[0]], "shuffle": True}, "batch_sampler excludes batch_size"),
        ({"batch_sampler": [[0]], "sampler": [0]}, "batch_sampler excludes batch_size"),
        ({"batch_sampler": [[0]], "drop_last": True}, "batch_sampler excludes batch_size"),
        ({"sampler": [0], "shuffle": True}, "the sampler decides the order"),
        ({"batch_size": 0}, "batch_size 0 is less than 1"),
        ({"prefetch_batches": 0}, "prefetch_batches 0 is less than 1"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    dataset: ImageBatches, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FastLoader(dataset, **settings)


def test_a_sampler_of_torchs_own_can_be_used(dataset: ImageBatches) -> None:
    loader = FastLoader(dataset, 5, sampler=SequentialSampler(range(PICTURES)), num_workers=2)
    assert len(loader) == 6
    assert torch.equal(torch.cat([batch.labels for batch in loader]), torch.from_numpy(dataset.labels))


def test_no_more_than_prefetch_batches_are_requested_ahead(dataset: ImageBatches) -> None:
    begun: list[int] = []

    def batches() -> Iterator[list[int]]:
        for sample in range(20):
            begun.append(sample)
            yield [sample]

    for ahead in (1, 4):
        begun.clear()
        loader = FastLoader(dataset, batch_sampler=batches(), num_workers=2, prefetch_batches=ahead)
        for number, _ in enumerate(loader):
            assert len(begun) == min(20, number + ahead)


# The memory of batches


@every_number
def test_a_batch_that_is_kept_is_never_overwritten(dataset: ImageBatches, workers: int) -> None:
    """A batch that is kept is never overwritten.

    Claim (dataloading/README.md, 6): a batch that is kept is never overwritten; the buffers of dropped batches are
    reused.
    """
    loader = make(dataset, workers, shuffle=True)
    kept = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        kept.append(list(loader))
    assert len({batch.images.data_ptr() for batches in kept for batch in batches}) == 4 * len(loader)
    for epoch, batches in enumerate(kept):
        order = ShuffledSampler(PICTURES, seed=2).order(epoch)
        for number, batch in enumerate(batches):
            assert_equal(batch, fresh(dataset, order[number * BATCH_SIZE :][:BATCH_SIZE], epoch))


@every_number
def test_the_memory_of_dropped_batches_is_reused(dataset: ImageBatches, workers: int) -> None:
    """The memory of dropped batches is reused.

    Claim (dataloading/README.md, 6): a batch that is kept is never overwritten; the buffers of dropped batches are
    reused.
    """
    loader = make(dataset, workers, prefetch_batches=2)
    addresses = []
    for _ in range(5):
        for batch in loader:
            addresses.append(batch.images.data_ptr())
            del batch
    assert len(addresses) == 5 * len(loader)
    assert len(set(addresses)) <= 2 + 2  # the prefetched ones, the user's, and one that a thread is about to release


# Nothing is left behind


def _to_the_end(batches: Iterator[Any]) -> None:
    for _ in batches:
        pass


def _break_early(batches: Iterator[Any]) -> None:
    for _ in batches:
        break


def _meet_a_bad_file(batches: Iterator[Any]) -> None:
    try:
        _to_the_end(batches)
    except BadFile as error:
        traceback.clear_frames(error.__traceback__)


@every_number
def test_nothing_is_left_however_an_epoch_ends(dataset: ImageBatches, own_pictures: Path, workers: int) -> None:
    """No thread or file is left, however an epoch ends.

    Claim (dataloading/README.md, 8): no thread or open file stays behind, however an epoch ends.
    """
    damaged = ImageBatches(ImageFiles(own_pictures))
    Path(damaged.files.path(6)).unlink()
    before = Traces()
    for end in (_to_the_end, _break_early, _meet_a_bad_file):
        loader = make(damaged if end is _meet_a_bad_file else dataset, workers)
        end(iter(loader))
        end(iter(loader))
        assert Traces().threads == before.threads, end
        del loader
    assert Traces() == before


# Signals


@pytest.mark.faults
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("loader", "processes"), [("fast-3-threads", 0), ("stock-2-threaded-fetch", 2)])
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


# On a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_one_line(dataset: ImageBatches) -> None:
    for device in ("cuda", "cuda:1", "meta"):
        with pytest.raises(UsageError, match=f"^device {device} is not there: give one that is, or leave it out"):
            FastLoader(dataset, device=device)
    assert FastLoader(dataset, device="cpu").device is None


@every_number
@pytest.mark.parametrize("end", [_to_the_end, _break_early])
def test_what_lies_on_a_gpu_is_right_though_copies_run_late(
    dataset: ImageBatches, workers: int, end: Callable[[Iterator[Any]], None], fake_gpu: FakeGpu
) -> None:
    """Batches on a (fake) GPU are right though its copies run late.

    Workers fill the memory of a batch again as soon as its copy is over, and not before.

    Claim (dataloading/README.md, 6): copies to a GPU are queued and waited for by events, and no buffer is reused
    before its copy is over (a fake GPU, whose copies run late).
    """
    before = Traces()
    loader = make(dataset, workers, 2, prefetch_batches=1, device="cuda")
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
    del loader
    assert Traces() == before


@pytest.mark.gpu
@every_number
def test_batches_on_a_gpu_are_right_though_it_is_steps_behind(dataset: ImageBatches, workers: int) -> None:
    arrived = []
    for batch in make(dataset, workers, 2, prefetch_batches=1, device="cuda"):
        torch.cuda._sleep(20_000_000)
        arrived.append(Batch(batch.images.clone(), batch.labels.clone()))
    for number, batch in enumerate(arrived):
        assert batch.images.device.type == "cuda"
        assert_equal(Batch(batch.images.cpu(), batch.labels.cpu()), fresh(dataset, [2 * number, 2 * number + 1]))
