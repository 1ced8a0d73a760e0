"""Commands that delete and write: --overwrite, export, and directories that belong to somebody else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.adversary.attempt import Attempt, made_by
from tests.adversary.scenes import BEFORE_A_RUN, RUN, TRAIN

OVERWRITE = f"{TRAIN} --run-dir {{run}} --overwrite"
EXPORT = "ddp.checkpoint export --run-dir {run}"
WHOLE_RUN = ("run/*",)  # what a run that goes well may write


def file(name: str, content: str = "dear all") -> Callable[[Path], None]:
    def make(here: Path) -> None:
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    return make


def link(name: str, to: str) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        path, target = here / name, here / to
        path.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            file(to)(here)
        path.symlink_to(target)

    return make


def folder(name: str) -> Callable[[Path], None]:
    return lambda here: (here / name).mkdir(parents=True)


def replaced_by_link(name: str) -> Callable[[Path], None]:
    """A folder of the run is moved elsewhere, and a link stands in its place."""

    def make(here: Path) -> None:
        shutil.move(here / "run" / name, here / "elsewhere")
        (here / "run" / name).symlink_to(here / "elsewhere")

    return make


def nested_run(here: Path) -> None:
    shutil.copytree(here / "run", here / "run" / "older")


def unreadable(here: Path) -> None:
    """Even for root: the name is a folder's."""
    (here / "weights.pt").mkdir()


def config(content: object) -> Callable[[Path], None]:
    return file("run/config.json", json.dumps(content))


def pipe(name: str) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        (here / name).parent.mkdir(exist_ok=True)
        os.mkfifo(here / name)

    return make


# Files in a run's directory beside it, which --overwrite must not delete.
FOREIGN: list[tuple[Callable[[Path], None], str]] = [
    (file("run/letter.txt"), r"letter\.txt"),
    (file("run/notes/letter.txt"), r"notes"),
    (file("run/checkpoints/letter.txt"), r"letter\.txt"),
    (file("run/checkpoints/epoch-0001-step-00000003/letter.txt"), r"letter\.txt"),
    (file("run/logs/letter.txt"), r"letter\.txt"),
    (folder("run/empty"), r"empty"),
    (nested_run, r"older"),
    (link("run/precious", "precious.txt"), r"precious"),
    (replaced_by_link("logs"), r"logs"),
    (replaced_by_link("checkpoints"), r"checkpoints"),
    (link("run/checkpoints/epoch-0002-step-00000006", "run/checkpoints/epoch-0001-step-00000003"), r"epoch-0002"),
    (file("run/model.py"), r"model\.py"),
    (file("run/.git/config"), r"\.git"),
    (file("run/metrics.jsonl.bak"), r"metrics\.jsonl\.bak"),
    (pipe("run/pipe"), r"pipe"),
]
# Folders that are no run of ours, with and without --overwrite.
OTHERS: list[Callable[[Path], None]] = [
    file("run/letter.txt"),
    file("run/config.json", "{}"),
    file("run/config.json", "not json"),
    config({"model": "gpt"}),
    file("run/checkpoints/letter.txt"),
    file("run/checkpoints/epoch-0001-step-00000003/model.pt"),
]
EXPORTS: list[tuple[Callable[[Path], None] | None, str, str]] = [
    (None, "--output /dev/null", r"/dev/null"),
    (None, "--output /dev/null --overwrite", r"/dev/null"),
    (None, "--output /dev/full --overwrite", r"/dev/full"),
    (file("weights.pt"), "--output {here}/weights.pt", r"weights\.pt"),
    (unreadable, "--output {here}/weights.pt --overwrite", r"weights\.pt"),
    (link("weights.pt", "precious.txt"), "--output {here}/weights.pt", r"weights\.pt"),
    (link("weights.pt", "precious.txt"), "--output {here}/weights.pt --overwrite", r"weights\.pt"),
    (pipe("weights.pt"), "--output {here}/weights.pt --overwrite", r"weights\.pt"),
    (None, "--output {run}/checkpoints/epoch-0001-step-00000003/model.pt", r"model\.pt"),
    (None, "--output {here}/nowhere/weights.pt", r"nowhere/weights\.pt"),
    (file("file"), "--output {here}/file/weights.pt", r"file/weights\.pt"),
    (None, "--output /proc/weights.pt", r"/proc/weights\.pt"),
    (None, "--output={here}/" + 300 * "w", r"File name too long"),
]

ATTEMPTS = [
    *(Attempt(OVERWRITE, line, scene=made_by(make), writes=("run/lock",)) for make, line in FOREIGN),
    *(
        Attempt(f"{RUN} {flag}", r"not a run|no run|is no regular file|holds no", scene=made_by(make), writes=BEFORE_A_RUN)
        for make in OTHERS
        for flag in ("", "--overwrite", "--resume", "--auto-resume")
    ),
    *(Attempt(f"{EXPORT} {flags}", line, scene=make and made_by(make)) for make, flags, line in EXPORTS),
    Attempt(f"{TRAIN} --run-dir {{run}}", r"holds a run: give --resume to continue it"),
    Attempt(f"dataparallel.train {TRAIN.split(' ', 3)[3]} --run-dir {{run}}", r"holds a run: give --overwrite"),
    Attempt(OVERWRITE, "test accuracy", status=0, writes=WHOLE_RUN),
    Attempt(f"{TRAIN} --run-dir {{run}} --auto-resume", "test accuracy", status=0, writes=WHOLE_RUN),
    # Outputs of the benchmarks.
    *(
        Attempt(f"{command} --output {{here}}/out", r"out is a file: give a folder", scene=made_by(file("out")))
        for command in (
            "ddp.bench allreduce", "dataloading.bench", "dataparallel.bench", "dataloading.ladder",
        )
    ),
]  # fmt: skip
