"""``dataloading.lfw_dataset``: samples and people from a folder, and files that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from common.errors import UsageError
from dataloading.dataset.lfw import LFWDataset
from tests.dataloading.conftest import PEOPLE, PICTURES
from tests.dataloading.faults import HEIGHT, WIDTH, save_picture


def pixels(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(image)


def test_a_folder_of_lfws_layout_gives_its_files_by_name_and_their_people(pictures: Path) -> None:
    files = LFWDataset(pictures)
    paths = sorted(pictures.glob("*/*.jpg"), key=lambda path: str(path.relative_to(pictures)))
    assert len(files) == len(paths) == PICTURES
    assert files.classes == PEOPLE
    assert [files.path(sample) for sample in range(PICTURES)] == [str(path) for path in paths]
    for sample, path in enumerate(paths):
        image, person = files[sample]
        np.testing.assert_array_equal(pixels(image), pixels(Image.open(path).convert("RGB")))
        assert PEOPLE[person] == path.parent.name
        assert type(person) is int
        assert files.read(sample) == path.read_bytes()


def test_files_directly_in_the_folder_are_of_the_people_that_their_names_say(tmp_path: Path) -> None:
    for number, name in enumerate(["Ann_Lee_0001", "Ann_Lee_0002", "Bo_Ek_0001", "portrait", "Cyd_Ray/x_1"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_picture(tmp_path / f"{name}.jpg", number)
    files = LFWDataset(tmp_path)
    assert files.classes == ("Ann_Lee", "Bo_Ek", "Cyd_Ray", "portrait")
    assert files.labels.tolist() == [0, 0, 1, 2, 3]
    assert files.labels.dtype == np.int64


def test_a_transform_makes_of_the_image_what_it_likes(pictures: Path) -> None:
    files = LFWDataset(pictures, transforms.ToTensor())
    image, _ = files[3]
    assert (image.dtype, image.shape) == (torch.float32, (3, HEIGHT, WIDTH))
    torch.testing.assert_close(image, transforms.functional.to_tensor(files.image(3)), rtol=0, atol=0)


@pytest.mark.parametrize("content", [[], ["notes.txt"], ["empty/"], ["deep/er/a.jpg"], [".hidden.jpg"]])
def test_a_folder_without_a_jpeg_is_refused_with_what_it_should_be(tmp_path: Path, content: list[str]) -> None:
    for name in content:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    with pytest.raises(UsageError) as refused:
        LFWDataset(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path} holds no JPEG file, nor do the folders in it: a data set is ")
    assert "<folder>/<Person_Name>/<Person_Name>_<NNNN>.jpg" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 0}, r"^image_size \(--image-size\) is 0: it must be at least 1$"),
        ({"augmentation": "all"}, r"^there is no augmentation 'all' \(--augmentation\): none, affine$"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LFWDataset(tmp_path, **arguments)
