"""``python -m dataloading.lfw_dataset``: the course's script, and user errors in one line."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataloading.lfw_dataset import main
from tests.dataloading.faults import save_picture
from tests.support.launch import run_forked

PROGRAM = "dataloading.lfw_dataset"
RunHere = Callable[..., list[str]]


@pytest.fixture(scope="module")
def few(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 12 pictures of two people."""
    root = tmp_path_factory.mktemp("few") / "people"
    for name in ("Ann_Lee", "Bo_Ek"):
        shutil.copytree(pictures / name, root / name)
    return root


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    (done,) = run_forked(PROGRAM, *arguments)
    return done


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunHere:
    """Runs the command in this process, and returns the lines of its output."""

    def lines_of(*arguments: str | Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [PROGRAM, *map(str, arguments)])
        main()
        out, err = capsys.readouterr()
        assert err == ""
        return out.splitlines()

    return lines_of


def test_without_arguments_it_reads_the_drawn_faces(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, few: Path, tmp_path: Path
) -> None:
    prepared = shutil.copytree(few, tmp_path / "raw-ddp" / "faces-v3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_here() == [
        f"{prepared}: 14 images of 2 people, the first 24x20",
        "a batch: images torch.float32 [32, 3, 20, 24], labels torch.int64 [32]",
    ]


COURSE_STYLE = "-visualize_batch -get_timing -num_workers 1 -batches_to_check 2 -batch_size 4 -path_to_folder"
OUR_STYLE = "--visualize-batch --get-timing --num-workers 1 --batches-to-check 2 --batch-size 4 --path-to-folder"


@pytest.mark.parametrize("flags", [COURSE_STYLE, OUR_STYLE])
def test_it_draws_a_batch_and_times_some(run_here: RunHere, few: Path, tmp_path: Path, flags: str) -> None:
    """The script draws a batch and times some.

    Claim (dataloading/README.md, 1): the script shows a batch and times some.
    """
    first, batch, drawn, timed = run_here(*flags.split(), few, "--output", tmp_path / "made" / "here")
    assert first == f"{few}: 14 images of 2 people, the first 24x20"
    assert batch == "a batch: images torch.float32 [4, 3, 20, 24], labels torch.int64 [4]"
    assert drawn == f"the batch is drawn in {tmp_path}/made/here/batch.png"
    assert re.match(
        r"2 batches of 4 with 1 workers: \d+\.\d\d ± \d+\.\d\d s over 5 passes, .*; [\d,]+ images/s ", timed
    )
    with Image.open(tmp_path / "made" / "here" / "batch.png") as figure:
        assert figure.format == "PNG"
        assert len(np.unique(np.asarray(figure.convert("RGB")).reshape(-1, 3), axis=0)) > 100


def test_images_are_augmented_and_resized(run_here: RunHere, few: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(few, tmp_path / "people")
    save_picture(folder / "Ann_Lee" / "Ann_Lee_0001.jpg", 0, size=(31, 32))
    lines = run_here(
        "-path_to_folder", folder, *["--augmentation", "affine", "--image-size", "16", "--batch-size", "15"]
    )
    assert lines == [
        f"{folder}: 14 images of 2 people, the first 16x16",
        "a batch: images torch.float32 [15, 3, 16, 16], labels torch.int64 [15]",
    ]
