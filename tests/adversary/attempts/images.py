"""Files that are no photos, or claim to be enormous ones; one limit for all decoders, read before memory is taken."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from common.data import DECODERS
from tests.adversary.attempt import Attempt, made_by
from tests.dataloading.faults import no_photo, save_picture, truncated, write_people
from tests.support.harm.disk import a_dangling_link, a_device, a_folder, a_pipe, empty

BAD = "Person_0/Person_0_0001.jpg"  # the file that is replaced


def resized(path: Path, height: int, width: int) -> None:
    """Another size in the header of a photo, whose content stays."""
    content = bytearray(path.read_bytes())
    start = next(i for i in range(len(content)) if content[i] == 0xFF and content[i + 1] in (0xC0, 0xC1, 0xC2))
    content[start + 5 : start + 9] = struct.pack(">HH", height, width)
    path.write_bytes(content)


def header_only(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4])


def a_png(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (24, 20)).save(path, "PNG")


def a_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def huge_file(path: Path) -> None:
    """Ten gigabytes that take no disk."""
    os.truncate(path, 10 * 10**9)


def enormous(path: Path) -> None:
    resized(path, 65500, 65500)


def long_and_thin(path: Path) -> None:
    resized(path, 65500, 1400)


def of_no_height(path: Path) -> None:
    resized(path, 0, 24)


def garbled(path: Path) -> None:
    """Nonsense in the middle of the entropy-coded data: markers that no photo has there."""
    content = bytearray(path.read_bytes())
    content[-200:-100] = b"\xff\xd8\xff\xc0" * 25
    path.write_bytes(content)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncated, r"is damaged"),
    (header_only, r"is damaged|is no JPEG"),
    (no_photo, r"is no JPEG file"),
    (empty, r"is empty"),
    (a_png, r"is no JPEG file"),
    (a_pipe, r"is empty"),
    (a_dangling_link, r"No such file|cannot be opened"),
    (a_link_to_itself, r"Too many levels|cannot be opened"),
    (a_device, r"is empty"),
    (huge_file, r"more than|bytes"),
    (enormous, r"pixels"),
    (long_and_thin, r"pixels"),
    (of_no_height, r"is damaged|0"),
    (garbled, r"is damaged"),
]
NAMES = (
    "Person_0_0001\n.jpg",
    "Person_\x1b[31m_0001.jpg",
    "\udcff\udcfe.jpg",
    "Person 0 0001.jpg",
    "x" * 240 + ".jpg",
    "%41.jpg",
)


def photos_with(damage: Callable[[Path], None], name: str = BAD) -> Callable[[Path], None]:
    """Twelve photos of two people, one of them damaged."""

    def make(here: Path) -> None:
        bad = write_people(here / "faces", {"Person_0": 6, "Person_1": 6}, size=(100, 80)) / BAD
        damage(bad)
        if name != BAD:
            bad.rename(here / "faces/Person_0" / name)

    return make


LOAD = "dataloading.lfw_dataset --path-to-folder {here}/faces --batch-size 3 --get-timing --batches-to-check 4 --output {here}/out"


def classes_with(*names: bytes) -> Callable[[Path], None]:
    """A folder of six photos for each class."""

    def make(here: Path) -> None:
        for label, name in enumerate(names):
            folder = here / "classes" / os.fsdecode(name)
            folder.mkdir(parents=True)
            for number in range(6):
                save_picture(folder / f"{number}.jpg", 10 * label + number)

    return make


ATTEMPTS = [
    # Names of classes that are no UTF-8, have control characters, or look like formulas: they are drawn and printed.
    *(
        Attempt(
            "ddp.train --device cpu --threads 1 --dataset folder --data-dir {here}/classes --image-size 16 --model fashion-cnn "
            "--epochs 1 --batch-size 4 --run-dir {here}/run",
            r"test accuracy",
            status=0,
            scene=made_by(classes_with(*names)),
            env={"PYTHONIOENCODING": "utf-8"},
            writes=("run/*",),
        )
        for names in ((b"caf\xe9", b"two\nlines"), (rb"$\frac$", b"\x1b[31mred"))
    ),
    *(
        Attempt(f"{LOAD} --decoder {decoder}", line, scene=made_by(photos_with(damage)))
        for decoder in DECODERS
        for damage, line in DAMAGES
    ),
    *(
        Attempt(f"{LOAD} --num-workers 1", line, scene=made_by(photos_with(damage)))
        for damage, line in (DAMAGES[0], DAMAGES[5], DAMAGES[10])
    ),
    # Names that disturb: of a whole photo, and of a damaged one, which must be one line.
    *(Attempt(LOAD, r"", status=0, scene=made_by(photos_with(lambda path: None, name))) for name in NAMES),
    *(Attempt(LOAD, r"is no JPEG file", scene=made_by(photos_with(no_photo, name))) for name in NAMES),
    Attempt(LOAD, r"is a folder|cannot|directory|no JPEG", scene=made_by(photos_with(a_folder)), status=2),
]  # fmt: skip
