"""``dataloading.synthetic``: the same people everywhere, files of LFW's kind, and a folder that is complete or absent."""

from __future__ import annotations

import errno
import io
import os
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from common.errors import UsageError
from dataloading.synthetic import face_cache, faces
from dataloading.synthetic.face_cache import PEOPLE, default_folder, ensure, images_of, name_of
from dataloading.synthetic.faces import SIDE, draw, encode

# The mean file size of 1,100 images drawn at random from LFW, deep-funneled (vis-www.cs.umass.edu/lfw), in bytes.
LFW_MEAN_SIZE = 8806


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face_cache, "images_of", lambda person: 3)


def test_every_person_image_and_seed_gives_a_different_picture() -> None:
    pictures = [draw(person, image, seed) for person in range(5) for image in range(3) for seed in range(2)]
    assert {(face.mode, face.size) for face in pictures} == {("RGB", (SIDE, SIDE))}
    assert len({face.tobytes() for face in pictures}) == len(pictures)


def test_the_number_of_images_has_a_long_tail() -> None:
    counts = [images_of(person) for person in range(PEOPLE)]
    assert 3_500 < sum(counts) < 4_500
    assert counts == sorted(counts, reverse=True)
    assert sum(count >= 40 for count in counts) == 24
    assert sum(count <= 3 for count in counts) > 0.8 * PEOPLE
    assert min(counts) == 1


def test_files_are_jpegs_like_lfws_with_their_size_and_its_spread() -> None:
    files = [encode(draw(person, person % 7)) for person in range(0, 900, 6)]
    sizes = [len(file) for file in files]
    assert np.mean(sizes) == pytest.approx(LFW_MEAN_SIZE, rel=0.1)
    assert np.std(sizes) == pytest.approx(1250, rel=0.2)
    reference = io.BytesIO()
    Image.new("RGB", (16, 16)).save(reference, "JPEG", quality=75)
    with Image.open(io.BytesIO(files[0])) as file, Image.open(reference) as quality_75:
        assert (file.format, file.size, file.mode) == ("JPEG", (250, 250), "RGB")
        assert file.quantization == quality_75.quantization  # type: ignore[attr-defined]
        assert "progressive" not in file.info
        # (component, horizontal sampling, vertical sampling, table): the colours have half the brightness's resolution
        assert [layer[1:3] for layer in file.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]


def test_the_folder_has_lfws_layout_and_is_drawn_once(
    tmp_path: Path, few_images: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure(tmp_path / "two", people=2)
    names = [name_of(person) for person in range(2)]
    assert files_below(folder) == sorted(f"{name}/{name}_{number:04d}.jpg" for name in names for number in (1, 2, 3))
    assert (folder / names[1] / f"{names[1]}_0003.jpg").read_bytes() == encode(draw(1, 2))
    assert os.listdir(tmp_path) == ["two"]
    monkeypatch.setattr(faces, "draw", None)
    assert ensure(folder, people=2) == folder


def test_the_default_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "raw-ddp" / "faces-v3"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_folder() == tmp_path / "home" / ".cache" / "raw-ddp" / "faces-v3"


def test_a_process_that_comes_second_uses_the_folder_of_the_first(
    tmp_path: Path, few_images: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw_while_another_finishes(person: int, image: int) -> Image.Image:
        (tmp_path / "faces").mkdir(exist_ok=True)
        (tmp_path / "faces" / "theirs").touch()
        return draw(person, image)

    monkeypatch.setattr(faces, "draw", draw_while_another_finishes)
    ensure(tmp_path / "faces", people=1)
    assert os.listdir(tmp_path) == ["faces"]
    assert files_below(tmp_path) == ["faces/theirs"]


@pytest.mark.parametrize(
    "failure, raised",
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), UsageError),
    ],
    ids=["Ctrl-C", "full disk"],
)
def test_an_interruption_and_a_full_disk_leave_nothing_half_done(
    tmp_path: Path,
    few_images: None,
    monkeypatch: pytest.MonkeyPatch,
    failure: BaseException,
    raised: type[BaseException],
) -> None:
    write_bytes = Path.write_bytes

    def fail(path: Path, data: bytes) -> int:
        if path.name.endswith("_0003.jpg"):
            raise failure
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(raised) as error:
        ensure(tmp_path / "faces", people=2)
    if raised is UsageError:
        assert re.fullmatch(
            f"cannot write the drawn faces to {tmp_path}/faces: No space left on device .*need 5. MB.*XDG_CACHE_HOME.*",
            str(error.value),
        )
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # this also holds for root, whom permissions do not stop
    for target in (tmp_path / "file", tmp_path / "file" / "faces", Path("/proc/faces/faces")):
        with pytest.raises(UsageError, match=f"cannot write the drawn faces to {target}: .* MB"):
            ensure(target, people=2)
    assert os.listdir(tmp_path) == ["file"]
