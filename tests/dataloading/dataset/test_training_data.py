"""dataloading/dataset/training_data.py: which people are classes, and which images are for testing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.data.datasets import Augmentation, Batch, BatchKey, ImageData, Images
from common.errors import UsageError
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.training_data import load_lfw
from dataloading.synthetic import face_cache
from tests.dataloading.faults import write_people

PEOPLE = {"Ann_Ash": 23, "Bob_Birch": 10, "Cy_Cedar": 4, "Di_Dill": 2, "Ed_Elm": 1}
AUGMENTATION = Augmentation(shift=2, flip=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_people(tmp_path_factory.mktemp("lfw") / "people", PEOPLE)


def load(folder: Path, **settings: Any) -> ImageData:
    return load_lfw(str(folder), **({"min_images_per_person": 2, "image_size": 16} | settings))


def names(part: Images) -> list[str]:
    assert isinstance(part, ImageBatches)
    return list(part.files.files)


def whole(part: Images) -> Batch:
    return part.__getitems__(BatchKey(0, np.arange(len(part))))


def test_people_with_enough_images_are_the_classes(folder: Path) -> None:
    assert load(folder).classes == ("Ann_Ash", "Bob_Birch", "Cy_Cedar", "Di_Dill")
    assert load(folder, min_images_per_person=10).classes == ("Ann_Ash", "Bob_Birch")


def test_a_fifth_of_each_person_is_for_testing_and_one_at_least(folder: Path) -> None:
    """A fifth of each person is for testing and one at least.

    Claim (dataloading/README.md, 9): a fifth of each person's images is for testing.
    """
    data = load(folder)
    assert np.bincount(data.test.labels).tolist() == [4, 2, 1, 1]
    assert np.bincount(data.train.labels).tolist() == [19, 8, 3, 1]
    together = names(data.train) + names(data.test)
    assert sorted(together) == sorted(
        f"{p}/{p}_{n:04d}.jpg" for p, count in PEOPLE.items() if count > 1 for n in range(1, count + 1)
    )
    for part in (data.train, data.test):
        assert [data.classes[label] for label in part.labels] == [name.split("/")[0] for name in names(part)]


def test_the_split_of_a_person_depends_on_nobody_else(folder: Path, tmp_path: Path) -> None:
    other = write_people(tmp_path / "other", {"Aa_Early": 12, "Bob_Birch": 10, "Zoe_Late": 3})
    tested, tested_there = (
        {name for name in names(load(where).test) if name.startswith("Bob")} for where in (folder, other)
    )
    assert tested == tested_there
    assert len(tested) == 2


def test_images_are_the_files_resized(folder: Path) -> None:
    data = load(folder)
    assert data.shape == data.test.shape == (3, 16, 16)
    images, labels = whole(data.test)
    assert labels.tolist() == data.test.labels.tolist()
    for pixels, name in zip(images.numpy(), names(data.test), strict=True):
        with Image.open(folder / name) as image:
            expected = image.resize((16, 16), Image.Resampling.BILINEAR, reducing_gap=2.0)
        np.testing.assert_array_equal(pixels.transpose(1, 2, 0), np.asarray(expected))


def test_mean_and_standard_deviation_are_those_of_the_training_pixels(folder: Path) -> None:
    data = load(folder)  # fewer than STATISTICS_SAMPLES, so of all
    pixels = whole(data.train).images.numpy() / 255
    assert data.mean == pytest.approx(pixels.mean())
    assert data.std == pytest.approx(pixels.std())


def test_training_batches_are_augmented_and_uncovered_pixels_grey(folder: Path) -> None:
    plain, data = load(folder), load(folder, augmentation=AUGMENTATION, seed=5)
    key = BatchKey(3, np.array([4, 0, 7]))
    augmentation = Augmentation(2, True, fill=round(255 * data.mean))
    expected = augmentation(plain.train.__getitems__(key).images.numpy(), 5, 3, key.samples)
    np.testing.assert_array_equal(data.train.__getitems__(key).images, expected)
    np.testing.assert_array_equal(whole(data.test).images, whole(plain.test).images)


def test_a_limit_takes_the_first_and_keeps_the_classes(folder: Path) -> None:
    data, few = load(folder), load(folder, train_samples=7, test_samples=1)
    assert names(few.train) == names(data.train)[:7]
    assert names(few.test) == names(data.test)[:1]
    assert few.classes == data.classes
    assert few.train.labels.tolist() == data.train.labels[:7].tolist()
    with pytest.raises(UsageError, match=r"^--train-samples 32 is more than the 31 that lfw has$"):
        load(folder, train_samples=32)


def test_the_fingerprint_tells_different_data_apart(folder: Path, tmp_path: Path) -> None:
    same = shutil.copytree(folder, tmp_path / "same")
    assert load(same, seed=1, augmentation=AUGMENTATION).fingerprint == load(folder).fingerprint
    few = load(folder, train_samples=5).fingerprint, load(folder, min_images_per_person=4).fingerprint
    renamed = shutil.copytree(folder, tmp_path / "renamed")
    (renamed / "Di_Dill" / "Di_Dill_0002.jpg").rename(renamed / "Di_Dill" / "Di_Dill_0003.jpg")
    changed = shutil.copytree(folder, tmp_path / "changed")
    shutil.copy(changed / "Ed_Elm" / "Ed_Elm_0001.jpg", changed / names(load(folder).train)[0])
    others = [load(where).fingerprint for where in (folder, renamed, changed)]
    assert len({*others, *few}) == 5


def test_without_a_folder_it_has_the_drawn_faces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face_cache, "ensure", lambda: folder)
    assert load_lfw(min_images_per_person=2, image_size=16).fingerprint == load(folder).fingerprint


def test_too_few_people_is_refused_with_what_there_is(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--min-images-per-person 24: in .*people, 0 of 5 .* images are 23 and 10: "):
        load(folder, min_images_per_person=24)
    with pytest.raises(UsageError, match="1 of 5 people have so many, and two are needed"):
        load(folder, min_images_per_person=11)
    alone = write_people(tmp_path / "alone", {"Ann_Ash": 3})
    with pytest.raises(UsageError, match=r"1 of 1 .* images are 3: "):
        load(alone)


def test_a_missing_folder_and_a_damaged_file_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path}/none is not there"):
        load(tmp_path / "none")
    broken = shutil.copytree(folder, tmp_path / "broken")
    path = broken / names(load(folder).train)[3]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=f"^{path} is "):
        load(broken)
