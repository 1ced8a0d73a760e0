"""``dataloading.synthetic.faces`` and its cache: the same people everywhere, files of LFW's kind, and a folder that is complete."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from common.errors import UsageError
from dataloading.synthetic import face_cache, faces
from dataloading.synthetic.drawing import SIDE
from dataloading.synthetic.face_cache import default_folder, ensure
from dataloading.synthetic.faces import QUALITY, draw, encode
from dataloading.synthetic.people import IDENTITIES, IMAGES, images_of, name_of
from tests.support.launch import REPOSITORY

# The mean file size of 1,100 images drawn at random from LFW, deep-funneled (vis-www.cs.umass.edu/lfw), in bytes.
LFW_MEAN_SIZE = 8806
PAIRS = [(0, 0), (0, 1), (1, 0), (500, 0), (IDENTITIES - 1, 0)]


def digest() -> str:
    return hashlib.sha256(b"".join(draw(*pair).tobytes() for pair in PAIRS)).hexdigest()


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure(tmp_path_factory.mktemp("faces") / "two", people=2)


def test_an_image_has_the_documented_form() -> None:
    face = draw(3, 1)
    assert face.mode == "RGB"
    assert face.size == (SIDE, SIDE) == (250, 250)


def test_another_process_and_another_order_draw_identical_pixels() -> None:
    program = "from tests.dataloading.synthetic.test_faces import digest, draw; draw(9, 9); print(digest())"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == digest()


def test_every_identity_image_and_seed_gives_a_different_picture() -> None:
    pictures = [draw(identity, image, seed) for identity in range(5) for image in range(3) for seed in range(2)]
    assert len({face.tobytes() for face in pictures}) == len(pictures)


def test_people_are_learnt_from_few_images_but_not_from_the_background() -> None:
    """A linear classifier of small pictures tells ten people apart in new images of them, and by their faces alone."""
    people, images = 10, 24
    pixels = np.array([[np.asarray(draw(i, k).reduce(10), np.float64) for k in range(images)] for i in range(people)])
    background = pixels[:, :, :12, :4]
    assert 0.5 < _linear_accuracy(pixels) < 0.95
    assert _linear_accuracy(background) < 0.3


def _linear_accuracy(pictures: npt.NDArray[np.float64]) -> float:
    """Trained on the first 18 images of each, tested on the rest: ridge regression to one-hot labels in closed form.

    :param pictures: [people, images, height, width, 3]
    """
    people, trained = len(pictures), 18
    inputs = pictures.reshape(*pictures.shape[:2], -1)
    inputs = inputs - inputs[:, :trained].mean((0, 1))
    known = inputs[:, :trained].reshape(people * trained, -1)
    targets = np.repeat(np.eye(people), trained, axis=0)
    kernel = known @ known.T
    weights = known.T @ np.linalg.solve(kernel + 0.01 * np.trace(kernel) / len(kernel) * np.eye(len(kernel)), targets)
    guesses = (inputs[:, trained:] @ weights).argmax(-1)
    return float((guesses == np.arange(people)[:, None]).mean())


def test_the_number_of_images_has_a_long_tail() -> None:
    counts = [images_of(identity) for identity in range(IDENTITIES)]
    assert sum(counts) == IMAGES
    assert 3_500 < IMAGES < 4_500
    assert counts == sorted(counts, reverse=True)
    assert sum(count >= 40 for count in counts) == 24
    assert sum(5 <= count <= 20 for count in counts) > 40
    assert sum(count <= 3 for count in counts) > 0.8 * IDENTITIES
    assert min(counts) == 1


def test_names_are_unique_and_plain() -> None:
    names = {name_of(identity) for identity in range(IDENTITIES)}
    assert len(names) == IDENTITIES
    assert all(re.fullmatch("[A-Z][a-z]+_[A-Z][a-z]+", name) for name in names)


@pytest.mark.parametrize("identity", [-1, IDENTITIES])
def test_nobody_else_has_a_name_or_images(identity: int) -> None:
    with pytest.raises(IndexError, match=f"identity {identity} is not in 0 ... {IDENTITIES - 1}"):
        name_of(identity)
    with pytest.raises(IndexError):
        images_of(identity)


def test_files_are_jpegs_like_lfws() -> None:
    reference = io.BytesIO()
    Image.new("RGB", (16, 16)).save(reference, "JPEG", quality=75)
    with Image.open(io.BytesIO(encode(draw(0, 0)))) as file, Image.open(reference) as quality_75:
        assert (file.format, file.size, file.mode) == ("JPEG", (250, 250), "RGB")
        assert QUALITY == 75
        assert file.quantization == quality_75.quantization  # type: ignore[attr-defined]
        assert "progressive" not in file.info
        # (component, horizontal sampling, vertical sampling, table): the colours have half the brightness's resolution
        assert [layer[1:3] for layer in file.layer] == [(2, 2), (1, 1), (1, 1)]  # type: ignore[attr-defined]


def test_files_have_lfws_size_and_its_spread() -> None:
    sizes = [len(encode(draw(identity, identity % 7))) for identity in range(0, 900, 6)]
    assert np.mean(sizes) == pytest.approx(LFW_MEAN_SIZE, rel=0.15)
    assert 800 < np.std(sizes) < 1_800


def test_the_folder_has_lfws_layout_and_the_faces(folder: Path) -> None:
    expected = [
        f"{name_of(identity)}/{name_of(identity)}_{number:04d}.jpg"
        for identity in range(2)
        for number in range(1, images_of(identity) + 1)
    ]
    assert files_below(folder) == sorted(expected)
    assert (folder / name_of(1) / f"{name_of(1)}_0003.jpg").read_bytes() == encode(draw(1, 2))
    assert os.listdir(folder.parent) == [folder.name]


def test_a_folder_that_is_there_is_used_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faces, "draw", None)
    assert ensure(folder, people=2) == folder


def test_the_default_folder_is_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face_cache, "images_of", lambda identity: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "raw-ddp" / "faces-v1"
    # some of the people must not pass for all of them
    assert ensure(people=2) != default_folder()
    assert not default_folder().exists()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert default_folder() == tmp_path / "home" / ".cache" / "raw-ddp" / "faces-v1"


def test_two_processes_at_once_leave_one_complete_folder(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "faces"
    program = (
        "import sys; from pathlib import Path; from dataloading.synthetic import face_cache\n"
        "write = face_cache._write\n"
        "def write_when_told(*arguments):\n"
        "    print('absent', flush=True); sys.stdin.readline(); write(*arguments)\n"
        "face_cache._write = write_when_told\n"
        f"print(face_cache.ensure(Path({str(target)!r}), people=2))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:  # both find no folder before either draws
        assert process.stdout is not None
        assert process.stdout.readline() == "absent\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [output for output, _ in outputs] == [f"{target}\n"] * 2
    assert files_below(target) == files_below(folder)
    assert os.listdir(target.parent) == ["faces"]


def test_whoever_comes_second_uses_the_firsts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "faces"

    def draw_while_another_finishes(identity: int, image: int) -> Image.Image:
        target.mkdir(exist_ok=True)
        (target / "theirs").touch()
        return draw(identity, image)

    monkeypatch.setattr(faces, "draw", draw_while_another_finishes)
    monkeypatch.setattr(face_cache, "images_of", lambda identity: 1)
    assert ensure(target, people=2) == target
    assert os.listdir(tmp_path) == ["faces"]
    assert os.listdir(target) == ["theirs"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write_until_full(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        with path.open("wb") as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    with pytest.raises(UsageError) as caught:
        ensure(tmp_path / "faces")
    message = str(caught.value)
    assert str(tmp_path / "faces") in message
    assert "No space left on device" in message
    assert re.search(r"need 5\d MB", message)
    assert "XDG_CACHE_HOME" in message
    assert "\n" not in message
    assert os.listdir(tmp_path) == []


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # this also holds for root, whom permissions do not stop
    for target in (tmp_path / "file", tmp_path / "file" / "faces", Path("/proc/faces/faces")):
        with pytest.raises(UsageError, match=f"cannot write the drawn faces to {target}: .* MB"):
            ensure(target, people=2)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match="Permission denied"):
        ensure(tmp_path / "faces", people=2)
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def interrupted(identity: int, image: int) -> Image.Image:
        if image == 2:
            assert os.listdir(tmp_path) != []
            raise interruption
        return draw(identity, image)

    monkeypatch.setattr(faces, "draw", interrupted)
    with pytest.raises(interruption):
        ensure(tmp_path / "faces", people=2)
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face_cache, "images_of", lambda identity: 1)
    for name in (".faces.old", ".faces.new", ".faces-v2.old"):
        (tmp_path / name / "faces").mkdir(parents=True)
    an_age_ago = time.time() - 2 * 3600
    for name in (".faces.old", ".faces-v2.old"):
        os.utime(tmp_path / name, (an_age_ago, an_age_ago))
    ensure(tmp_path / "faces", people=1)
    assert sorted(os.listdir(tmp_path)) == [".faces-v2.old", ".faces.new", "faces"]


@pytest.mark.parametrize("people", [0, IDENTITIES + 1])
def test_no_more_people_than_there_are(tmp_path: Path, people: int) -> None:
    with pytest.raises(ValueError, match=f"people {people} is not in"):
        ensure(tmp_path / "faces", people=people)
