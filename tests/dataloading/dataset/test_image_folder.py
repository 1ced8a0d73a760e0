"""``load_folder`` and ``ImageFolder``: the layouts of a folder of classes, any format that Pillow reads, and every refusal."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.data.datasets import BatchKey, ImageData, Images
from common.errors import UsageError
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.training_data import load_folder
from dataloading.loader.fast_loader import FastLoader

FORMATS = ("png", "jpg", "webp", "gif", "bmp", "tiff", "ppm")
COUNTS = {"cats": 12, "dogs": 10, "owls": 2}


def write_images(folder: Path, classes: dict[str, int]) -> Path:
    """A color per class; another format, mode and size for each image."""
    for number, (name, count) in enumerate(classes.items()):
        (folder / name / "more").mkdir(parents=True)
        for i in range(count):
            image = Image.new("RGB", (20 + i, 30 - i), (80 * number, 200 - 80 * number, 100))
            suffix = FORMATS[i % len(FORMATS)]
            if suffix == "png":
                image = image.convert(("RGBA", "P", "L")[i // len(FORMATS) % 3])
            image.save(folder / name / ("more" if i % 4 == 3 else ".") / f"{i}.{suffix.upper() if i % 2 else suffix}")
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("folder") / "photos", COUNTS)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(written, tmp_path / "photos")


def load(folder: Path, **settings: Any) -> ImageData:
    return load_folder(str(folder), **({"image_size": 16} | settings))


def names(part: Images) -> list[str]:
    assert isinstance(part, ImageBatches)
    return list(part.files.files)


def counts(part: Images) -> list[int]:
    return [int(count) for count in np.bincount(part.labels)]


def test_a_fifth_of_each_class_is_for_testing(written: Path) -> None:
    data = load(written)
    assert (data.name, data.classes, data.shape) == ("folder", ("cats", "dogs", "owls"), (3, 16, 16))
    assert (counts(data.train), counts(data.test)) == ([10, 8, 1], [2, 2, 1])
    assert set(names(data.train)).isdisjoint(names(data.test))


def test_every_format_becomes_rgb_of_one_size(written: Path) -> None:
    data = load(written)
    for part in (data.train, data.test):
        key = BatchKey(0, np.arange(len(part)))
        batch = part.__getitems__(key)
        assert batch.images.shape == (len(part), 3, 16, 16)
        assert isinstance(part, ImageBatches)
        (fast,) = FastLoader(part, batch_sampler=[key], num_workers=2)
        np.testing.assert_array_equal(fast.images, batch.images)
        for image, label, name in zip(batch.images, batch.labels.tolist(), names(part), strict=True):
            assert name.split("/")[0] == data.classes[label]
            color = image.double().mean((1, 2)).tolist()
            if name.endswith(("bmp", "ppm")):
                assert color == [80 * label, 200 - 80 * label, 100]


def test_folders_train_and_test_are_taken_as_they_are(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cats": 6, "dogs": 3})
    write_images(tmp_path / "test", {"cats": 1, "dogs": 2})
    data = load(tmp_path)
    assert (counts(data.train), counts(data.test), data.classes) == ([6, 3], [1, 2], ("cats", "dogs"))
    assert data.train.labels.tolist() != sorted(
        data.train.labels.tolist()
    )  # so that --train-samples takes of every class
    assert (len(load(tmp_path, train_samples=4).train), len(load(tmp_path, test_samples=1).test)) == (4, 1)


def test_what_is_hidden_or_no_image_is_left_out(written: Path, folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / "cats" / ".thumbnails").mkdir()
    for name in ("cats/notes.txt", "cats/._0.jpg", "cats/.thumbnails/0.png", "README", "list.csv"):
        (folder / name).write_bytes(b"no image")
    assert load(folder).fingerprint == load(written).fingerprint


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(UsageError) as error:
        load(folder, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_another_layout_is_refused(folder: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "none").startswith(
        f"--data-dir {tmp_path / 'none'} is not there: give a folder, DIR/CLASS"
    )
    assert f"--data-dir {folder}/cats/0.png is a file" in refusal(folder / "cats" / "0.png")
    assert f"{folder}/cats needs a folder of images for each of two classes or more, and has 1" in refusal(
        folder / "cats"
    )
    assert f"{folder}/cats/more needs a folder of images for each of two classes or more, and has 0" in refusal(
        folder / "cats" / "more"
    )
    assert "--test-samples 6 is more than the 5 that folder has" in refusal(folder, test_samples=6)


def test_a_class_with_too_few_images_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "owls" / "0.png").unlink()
    assert f"{folder}/owls holds one image and needs two" in refusal(folder)
    (folder / "owls" / "1.JPG").unlink()
    assert f"{folder}/owls holds no image that Pillow reads" in refusal(folder)


@pytest.mark.parametrize("link", ["cats/again", "cats/more/up", "cats/9.png", "whales"])
def test_images_that_are_there_twice_are_refused(folder: Path, link: str) -> None:
    """A link to a folder around it, a link to another class, a file by two names, a class by two names."""
    target = {"cats/again": folder / "cats", "cats/more/up": folder / "owls", "cats/9.png": folder / "cats" / "0.png"}
    (folder / link).symlink_to(target.get(link, folder / "owls"))
    assert "is the same as" in refusal(folder)
    assert "by a link: its images would count twice, perhaps for training and for testing" in refusal(folder)


def test_a_link_to_itself_is_named(folder: Path) -> None:
    (folder / "cats" / "round.png").symlink_to("round.png")
    assert refusal(folder) == f"{folder}/cats/round.png cannot be listed: Too many levels of symbolic links"


def test_a_test_image_that_is_a_training_image_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_images(tmp_path / part, {"cats": 2, "dogs": 2})
    load(tmp_path)
    (tmp_path / "test" / "dogs" / "5.png").hardlink_to(tmp_path / "train" / "dogs" / "0.png")
    assert f"{tmp_path}/test/dogs/5.png is the same as {tmp_path}/train/dogs/0.png, by a link" in refusal(tmp_path)


def test_half_a_pair_of_train_and_test_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "train", {"cats": 2, "dogs": 2})
    (tmp_path / "val").mkdir()
    assert f"{tmp_path}/train is there and {tmp_path}/test is not" in refusal(tmp_path)
    write_images(tmp_path / "test", {"cats": 2, "owls": 2})
    assert f"{tmp_path}/train has a class dogs and {tmp_path}/test has none" in refusal(tmp_path)
