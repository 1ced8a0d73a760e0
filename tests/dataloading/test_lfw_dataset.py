"""``python -m dataloading.lfw_dataset``: the course's script, and user errors in one line."""

from __future__ import annotations

import itertools
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
from tests.support.launch import error_lines, run_forked
from tests.support.user_errors import UserError

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
    prepared = shutil.copytree(few, tmp_path / "raw-ddp" / "faces-v2")
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


def test_skipped_files_are_not_timed_as_images(
    run_here: RunHere, few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(few, tmp_path / "people")
    for path in sorted(folder.glob("*/*.jpg"))[::2]:
        path.write_bytes(b"")
    clock = itertools.count()
    monkeypatch.setattr("dataloading.lfw_dataset.time.perf_counter", lambda: next(clock))  # each pass takes 1 s
    *_, timed, skipped = run_here(
        "-get_timing", "-batches_to_check", "7", "-batch_size", "4", "-on_error", "skip", "-path_to_folder", folder
    )
    assert "; 14 images/s " in timed  # of 28 files
    assert skipped == "files skipped: 7"


def test_augmented_resized_and_without_bad_files(few: Path, tmp_path: Path) -> None:
    """The command augments and resizes the images, and skips a bad file with a warning."""
    folder = shutil.copytree(few, tmp_path / "people")
    save_picture(folder / "Ann_Lee" / "Ann_Lee_0001.jpg", 0, size=(31, 32))
    (folder / "Bo_Ek" / "broken.jpg").write_bytes(b"")
    flags = "--augmentation affine --image-size 16 --on-error skip --batch-size 15"
    result = run("-path_to_folder", folder, *flags.split())
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"{folder}: 15 images of 2 people, the first 16x16",
        "a batch: images torch.float32 [14, 3, 16, 16], labels torch.int64 [14]",
        "files skipped: 1",
    ]
    (warning,) = result.stderr.splitlines()
    assert warning.startswith(f"skipped: {folder}/Bo_Ek/broken.jpg is empty")


@pytest.mark.parametrize(
    "flags, words",
    [
        (["-batches_to_check", "many"], "-batches_to_check: invalid int value: 'many'"),
        (["-augmentation", "heavy"], "invalid choice: 'heavy'"),
        (["-path_to_folder", "/no/such/folder"], "/no/such/folder is not there: give a folder of JPEGs"),
    ],
)
def test_a_wrong_flag_is_one_line(user_error: UserError, flags: list[str], words: str) -> None:
    assert words in user_error(main, *flags)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_file_is_one_line_also_from_a_worker(few: Path, tmp_path: Path, workers: int) -> None:
    folder = shutil.copytree(few, tmp_path / "people")
    last = sorted(folder.glob("*/*.jpg"))[-1]
    last.write_bytes(last.read_bytes()[:-60])
    result = run("-path_to_folder", folder, "-batch_size", "14", "-num_workers", str(workers))
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2
    assert line.startswith(f"error: {last} is damaged: image file is truncated")
    assert line.endswith("fetch it again, or remove it")


def test_a_first_batch_of_which_nothing_can_be_read_is_one_line(tmp_path: Path) -> None:
    save_picture(tmp_path / "a.jpg", 0)
    for number in range(9):
        (tmp_path / f"b{number}.jpg").write_bytes(b"")
    result = run("-path_to_folder", tmp_path, "-on_error", "skip", "-batch_size", "1")
    assert result.returncode == 2
    assert error_lines(result.stderr) == [f"error: {tmp_path}: no file of the first batch of 1 can be read"]
