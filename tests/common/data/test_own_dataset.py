"""common/data/own_dataset.py: what ``--dataset module:function`` may return, and the one line for everything else."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from common.data.datasets import Augmentation, BatchKey, ImageData, ImageDataset, Images, keep_batch
from common.data.own_dataset import STATISTICS_SAMPLES, load_own
from common.errors import UsageError

Load = Callable[..., ImageData]
IMAGES = np.random.default_rng(0).integers(0, 256, (30, 3, 9, 8), np.uint8)
LABELS = np.arange(30) % 3
ARRAYS = (IMAGES[:20], LABELS[:20]), (IMAGES[20:], LABELS[20:]), ["a", "b", "c"]


class Samples:
    """A map-style data set of Pillow images, with a random transform."""

    def __init__(self, images: Any, labels: Any, noise: bool = False) -> None:
        self.images, self.labels, self.noise = images, labels, noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index].transpose(1, 2, 0)
        if self.noise:
            image = image ^ np.uint8(random.getrandbits(3) + np.random.randint(8) + torch.randint(8, ()).item())
        return Image.fromarray(image), int(self.labels[index])


def samples(noise: bool = False) -> tuple[Any, Any, list[str]]:
    return Samples(IMAGES[:20], LABELS[:20], noise), Samples(IMAGES[20:], LABELS[20:], noise), ["a", "b", "c"]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """``load(returned, **settings)``: what this function, or one that returns this, makes under the name ``own:load``."""

    def load_it(returned: Any, **settings: Any) -> ImageData:
        module = type(pytest)("own")
        module.load = returned if callable(returned) else lambda: returned  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, "own", module)
        return load_own("own:load", **settings)

    return load_it


def whole(half: Images, epoch: int = 0) -> tuple[Any, Any]:
    batch = half.__getitems__(BatchKey(epoch, np.arange(len(half))))
    return batch.images.numpy(), batch.labels.numpy()


@pytest.mark.parametrize(
    "returned",
    [
        ARRAYS,
        (tuple(map(torch.from_numpy, ARRAYS[0])), *ARRAYS[1:]),
        samples(),
        ([(image, int(label)) for image, label in zip(*ARRAYS[0], strict=True)], *samples()[1:]),
    ],
    ids=["arrays", "tensors", "map-style", "a list of pairs"],
)
def test_every_form_gives_the_same_data_set(load: Load, returned: Any) -> None:
    data = load(returned)
    assert (data.name, data.shape, data.classes) == ("own:load", (3, 9, 8), ("a", "b", "c"))
    for half, (images, labels) in ((data.train, ARRAYS[0]), (data.test, ARRAYS[1])):
        np.testing.assert_array_equal(whole(half)[0], images)
        np.testing.assert_array_equal(whole(half)[1], labels)
        np.testing.assert_array_equal(half.labels, labels)
    assert data.mean == pytest.approx(IMAGES[:20].mean() / 255)
    assert data.std == pytest.approx(IMAGES[:20].std() / 255)
    assert data.fingerprint == load(ARRAYS).fingerprint


def test_grey_images_need_no_channel_and_limits_take_the_first(load: Load) -> None:
    data = load(((IMAGES[:20, 0], LABELS[:20]), (IMAGES[20:, 0], LABELS[20:]), ["abc"] * 3), train_samples=7)
    assert (data.shape, len(data.train), len(data.test)) == ((1, 9, 8), 7, 10)
    assert len(load(samples(), test_samples=4).test) == 4


def test_the_fingerprint_tells_other_data_apart(load: Load) -> None:
    changed = IMAGES[:20].copy()
    changed[3, 0, 0, 0] ^= 1
    others = [((changed, LABELS[:20]), *ARRAYS[1:]), (*ARRAYS[:2], ["a", "b", "d"])]
    assert len({load(returned).fingerprint for returned in (ARRAYS, *others)}) == 3


def test_arrays_are_augmented_as_asked_and_an_image_data_is_taken_whole(load: Load) -> None:
    data = load(ARRAYS, augmentation=Augmentation(shift=2), seed=4)
    assert not np.array_equal(whole(data.train)[0], IMAGES[:20])
    assert isinstance(data.train, ImageDataset)
    assert load(data) is data
    with pytest.raises(UsageError, match=r"--train-samples 3: .* returns an ImageData, which is taken whole"):
        load(data, train_samples=3)


def test_random_transforms_follow_from_seed_epoch_and_sample_alone(load: Load) -> None:
    train = load(samples(noise=True), seed=1).train
    first = whole(train)[0]
    random.random(), np.random.random(), torch.rand(())
    np.testing.assert_array_equal(whole(train)[0], first)
    assert not np.array_equal(whole(train, epoch=1)[0], first)
    assert not np.array_equal(whole(load(samples(noise=True), seed=2).train)[0], first)
    keys: Any = [BatchKey(0, np.array([5, 19])), BatchKey(0, np.array([0]))]
    workers: Any = DataLoader(train, batch_sampler=keys, collate_fn=keep_batch, num_workers=2)  # type: ignore[arg-type]
    for batch, key in zip(workers, keys, strict=True):
        np.testing.assert_array_equal(batch.images, first[key.samples])


def test_only_the_samples_of_the_statistics_are_read_before_training(load: Load) -> None:
    fetched: list[int] = []

    class Slow(Samples):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            fetched.append(index)
            return super().__getitem__(index)

    images, labels = IMAGES.repeat(50, 0), LABELS.repeat(50)
    data = load((Slow(images, labels), Slow(images, labels), ["a", "b", "c"]))
    assert data.label_shape == ()
    assert len(fetched) == 2 * (1 + STATISTICS_SAMPLES)


def test_sixteen_bits_keep_their_upper_eight_and_floats_are_refused(load: Load) -> None:
    grey = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    half = [(Image.fromarray(grey), 0), (Image.fromarray(grey), 1)]
    images, _ = whole(load((half, half, ["a", "b"])).train)
    np.testing.assert_array_equal(images[0], np.broadcast_to(grey >> 8, (3, 8, 8)))
    with pytest.raises(UsageError, match="sample 0 is an image whose pixels of Pillow's mode F have no range"):
        load(pairs(Image.fromarray(grey.astype(np.float32)), 0))


def pairs(image: Any, label: Any) -> tuple[Any, Any, list[str]]:
    return [(image, label)], [(image, label)], ["a", "b"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned a NoneType: it must return (train, test, class_names)"),
        ((*ARRAYS[:2], "abc"), "returned 'abc' for class_names: it must be a list of two or more names"),
        ((*ARRAYS[:2], ["a", "b"]), ", train: labels must be integers from 0 to 1"),
        ((iter([]), *ARRAYS[1:]), ", train: a list_iterator is no half of a data set: each half is "),
        (([], *ARRAYS[1:]), ", train: there are no samples"),
        (((IMAGES / 255, LABELS), *ARRAYS[1:]), ", train: float64 [30, 3, 9, 8] and int64 [30] are not uint8 images"),
        (
            (ARRAYS[0], (IMAGES.transpose(0, 2, 3, 1), LABELS), ["a", "b", "c"]),
            ", test: images [30, 9, 8, 3] have their",
        ),
        (
            (ARRAYS[0], (IMAGES[:, :1], LABELS), ["a", "b", "c"]),
            "training images are [3, 9, 8] and test images [1, 9, 8]",
        ),
        (pairs(IMAGES[0], 2), ", train: sample 0 has 2 for a label, which is not an integer from 0 to 1"),
        (pairs(IMAGES[0] / 255, 0), "sample 0 has float64 [3, 9, 8] for an image: give a Pillow image, or uint8"),
        (([IMAGES[0]], *ARRAYS[1:]), "sample 0 is uint8 [3, 9, 8] and not a pair of an image and its label"),
        (
            ([(IMAGES[0], 0), (IMAGES[0, :2], 0)], *ARRAYS[1:]),
            "sample 1 has an image [2, 9, 8] and sample 0 one [3, 9, 8]",
        ),
    ],
)
def test_anything_else_is_refused_in_a_line_that_names_the_flag(load: Load, returned: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"^--dataset own:load.*{re.escape(message)}") as error:
        load(returned)
    assert "\n" not in str(error.value)


def test_a_bad_sample_stays_one_line_when_a_worker_finds_it(load: Load) -> None:
    train, test, names = samples()
    data = load((train, test, names))
    train.labels = np.full(20, 7)
    try:
        data.train.__getitems__(BatchKey(0, np.array([5])))
    except UsageError:
        from_worker = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(UsageError) as error:
        from_worker.reraise()
    expected = "--dataset own:load, train: sample 5 has 7 for a label, which is not an integer from 0 to 2"
    assert str(error.value) == expected


def test_what_the_function_itself_raises_keeps_its_traceback(load: Load) -> None:
    def broken() -> None:
        raise FileNotFoundError(2, "No such file", "pixels.npy")

    with pytest.raises(RuntimeError, match="--dataset own:load failed: FileNotFoundError") as error:
        load(broken)
    assert isinstance(error.value.__cause__, FileNotFoundError)
