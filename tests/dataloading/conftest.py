"""Small folders of pictures, drawn once for all tests; a test that damages one takes a copy."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.dataloading.faults import save_picture

PEOPLE = ("Ann_Lee", "Bo_Ek", "Cyd_Ray", "Dee_Fox")
PICTURES = 26


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 JPEGs of 24x20 pixels of four people, in LFW's layout: in colour, grey, CMYK, and progressive."""
    root = tmp_path_factory.mktemp("pictures")
    for number in range(PICTURES):
        name = PEOPLE[number % len(PEOPLE)]
        (root / name).mkdir(exist_ok=True)
        mode = {5: "L", 11: "CMYK"}.get(number, "RGB")
        save_picture(root / name / f"{name}_{number + 1:04d}.jpg", number, mode=mode, progressive=number == 17)
    return root


@pytest.fixture
def own_pictures(pictures: Path, tmp_path: Path) -> Path:
    """A copy of the pictures, to do damage to."""
    return shutil.copytree(pictures, tmp_path / "own pictures")
