"""Files of a run that are damaged, or forged: nonsense with digests that are right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.adversary.attempt import Attempt, made_by
from tests.adversary.scenes import EVALUATE, RESUME
from tests.ddp.checkpoint.samples import Malicious, forge
from tests.support.harm.disk import a_dangling_link, a_folder, empty, missing

CHECKPOINT = "checkpoints/epoch-0001-step-00000003"
IN_A_CHECKPOINT = ("manifest.json", "SHA256SUMS", "model.pt", "optimizer.pt", "ranks.pt")


# The changes that a file may suffer.


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff\x1b[31m\n{[" * 100)


def another_type(path: Path) -> None:
    """JSON, but of a kind that nobody expects."""
    path.write_text("[[3]]\n")


def deep(path: Path) -> None:
    """JSON that is nested beyond the parser's depth."""
    path.write_text("[" * 100_000)


DAMAGES = (missing, empty, cut, garbage, another_type, deep, a_folder, a_dangling_link)


def damaged(name: str, damage: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda here: damage(here / "run" / name)


# Forgeries: digests are right, contents are not.


def of_tensors(kind: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        path = here / "run" / CHECKPOINT
        content = torch.load(path / f"{kind}.pt", weights_only=True)
        torch.save(change(content), path / f"{kind}.pt")
        forge(path)

    return make


def of_facts(**facts: Any) -> Callable[[Path], None]:
    return lambda here: forge(here / "run" / CHECKPOINT, **facts)


def with_momentum(value: Any) -> Callable[[Any], Any]:
    def change(content: Any) -> Any:
        content["state"][0]["momentum_buffer"] = value
        return content

    return change


def renamed(name: str) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        (here / "run" / CHECKPOINT).rename(here / "run" / "checkpoints" / name)

    return make


def with_code(here: Path) -> None:
    path = here / "run" / CHECKPOINT
    torch.save({"weight": Malicious(here / "executed")}, path / "model.pt")
    forge(path)


# Contents that could harm the memory of the run that continues. Evaluation needs none of it. (tests/ddp/checkpoint/test_state.py has more.)
OF_TRAINING: list[tuple[Callable[[Path], None], str]] = [
    (
        of_tensors("optimizer", with_momentum(torch.zeros(3))),
        r"has momentum_buffer:[\w.]+ of shape \[3\] instead",
    ),
]
# Contents that could harm any memory, runs code, names files elsewhere, or is another checkpoint than it says.
OF_BOTH: list[tuple[Callable[[Path], None], str]] = [
    (of_tensors("model", lambda content: {}), r"Missing key"),
    (of_tensors("model", lambda content: dict.fromkeys(content, torch.zeros(2))), r"size mismatch"),
    (with_code, r"model\.pt"),
    (of_facts(format=99), r"format"),
    (of_facts(files={"../../precious": 3}), r"manifest\.json|files"),
    (renamed("epoch-0001-step-00000099"), r"epoch-0001-step-00000099"),
]

ANY = ("run/*",)
OTHER_FILES = ("config.json", "metrics.jsonl", "result.json", "launch.json", "curves.png")

ATTEMPTS = [
    # The only checkpoint is damaged: to go on from it is refused, it is set aside, and nothing else of the run changes.
    *(
        Attempt(RESUME, r"no checkpoint", scene=made_by(damaged(f"{CHECKPOINT}/{name}", damage)), writes=("run/*",))
        for name in IN_A_CHECKPOINT
        for damage in DAMAGES
    ),
    *(
        Attempt(EVALUATE, r"epoch-0001-step-00000003|no checkpoint", scene=made_by(damaged(f"{CHECKPOINT}/{name}", damage)))
        for name in ("manifest.json", "model.pt")
        for damage in DAMAGES
    ),
    *(Attempt(EVALUATE, line, scene=made_by(forgery)) for forgery, line in OF_BOTH),
    *(Attempt(EVALUATE, r"accuracy", status=0, scene=made_by(forgery)) for forgery, _ in OF_TRAINING),
    *(Attempt(RESUME, line, scene=made_by(forgery), writes=ANY) for forgery, line in (*OF_TRAINING, *OF_BOTH)),
    # Other files of a run are made again, or their damage is told.
    *(
        Attempt(RESUME, r"test accuracy \S+ % after 2 epochs", status=0, scene=made_by(damaged(name, damage)), writes=ANY)
        for name in OTHER_FILES
        for damage in (missing, garbage, another_type, deep)
    ),
    *(Attempt(RESUME, r"", status=0, scene=made_by(damaged(name, a_dangling_link)), writes=ANY) for name in OTHER_FILES),
]  # fmt: skip
