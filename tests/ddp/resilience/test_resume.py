"""ddp/resilience/resume.py: where a run begins or continues, and that it never continues as another run; on every rank alike."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common.command_line.cli import flag_of
from common.errors import UsageError
from common.files.run_directory import CONFIG_FILE, REQUEUE_FILE
from ddp.checkpoint import storage
from ddp.checkpoint.directory import SAVING
from ddp.checkpoint.storage import FOLDER
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.resilience.resume import differences, open_run
from tests.ddp.checkpoint.samples import contents, forge, manifest
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

OLDER, NEWER = "epoch-0001-step-00000010", "epoch-0002-step-00000020"
SETTINGS: dict[str, Any] = {"train_samples": 144, "test_samples": 20, "model": "mlp", "epochs": 3}


class Opening(NamedTuple):
    """A try to open the run: what is done to its directory first, with which settings, and over which data."""

    settings: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    prepare: Callable[[Path], None] | None = None
    fingerprint: str | None = None


def found_in_each(run_dir: Path, openings: list[Opening]) -> list[str | None]:
    """For each opening the checkpoint's name, None for a run from the start, or what is said against it."""
    with process_group(threads=1) as env:
        data = load_data(small(**SETTINGS), env)
        found = []
        for settings, prepare, fingerprint in openings:
            with env.fail_together():
                if env.is_main and prepare is not None:
                    prepare(run_dir)
            there = dataclasses.replace(data, fingerprint=fingerprint) if fingerprint else data
            try:
                with open_run(small(**SETTINGS | settings, run_dir=run_dir), env, there) as checkpoint:
                    found.append(checkpoint.path.name if checkpoint else None)
            except UsageError as error:
                found.append(str(error) if error.seen_by_all else f"said by each rank: {error}")
        return found


def opened(run_dir: Path, *openings: Opening) -> list[str | None]:
    """:func:`found_in_each` on two ranks, which have found the same."""
    first, second = run_ranks(found_in_each, 2, run_dir, list(openings))
    assert first == second
    return first  # type: ignore[no-any-return]


def save(run_dir: Path) -> None:
    """Two checkpoints of the run that is there, as it would write them."""
    began = json.loads((run_dir / CONFIG_FILE).read_text())
    config = began["config"]
    for step in (10, 20):
        facts = dataclasses.replace(
            manifest(step),
            config=config,
            dataset_length=config["train_samples"],
            dataset_fingerprint=began["dataset_fingerprint"],
        )
        storage.write(run_dir, facts, contents(step))


def to_newer_format(run_dir: Path) -> None:
    forge(run_dir / FOLDER / NEWER, format=99)


def cut_newest(run_dir: Path) -> None:
    with open(run_dir / FOLDER / NEWER / "model.pt", "r+b") as file:
        file.truncate(100)


def leave_litter(run_dir: Path) -> None:
    """The files of a run that was stopped, and of one that was killed in a save."""
    (run_dir / REQUEUE_FILE).write_text("{}")
    (run_dir / FOLDER / f"{SAVING}0123").mkdir()


RESUME, AUTO = {"resume": True}, {"auto_resume": True}

OTHERS: list[tuple[str, Any, Any]] = [
    ("model", "mlp", "fashion-cnn"),
    ("dataset", "glyphs", "fashion-mnist"),
    ("train_samples", 144, 288),
    ("seed", 0, 1),
    ("batch_size", 144, 72),
    ("optimizer", "sgd", "adam"),
]


def test_another_run_is_refused_by_name_on_every_rank(tmp_path: Path) -> None:
    """A checkpoint of another model, data set, seed, batch size or optimizer is refused by name on every rank.

    Claim (ddp/README.md, 9): another model, data set, seed, batch or optimizer is refused by name.
    """
    run_dir = tmp_path / "run"
    others = [Opening(RESUME | {name: value}) for name, _, value in OTHERS]
    first, *refusals, fewer, other_data, newer = opened(
        run_dir,
        Opening(),
        *(other._replace(prepare=None if i else save) for i, other in enumerate(others)),
        Opening(RESUME | {"epochs": 1}),
        Opening(RESUME, fingerprint="0123456789abcdef"),
        Opening(RESUME, to_newer_format),
    )
    assert first is None
    for (name, before, now), said in zip(OTHERS, refusals, strict=True):
        flag = flag_of(name)
        assert said == (
            f"--resume: the run was started with {flag} {before}, not {now}: give {flag} {before}, or another --run-dir"
        )
    assert fewer == "--epochs 1 is less than the 2 epochs and 0 steps that the run has behind it"
    assert other_data is not None and newer is not None
    assert other_data.startswith("--resume: the run was started with other data: 144 training samples with digest ")
    assert other_data.endswith(" --test-samples, or another --run-dir")
    assert newer == f"{run_dir / FOLDER / NEWER} has the format 99, this version reads 5: use the one that wrote it"
    assert (run_dir / FOLDER / NEWER).is_dir() and (run_dir / FOLDER / OLDER).is_dir()


def test_a_run_begins_and_continues_where_it_should(tmp_path: Path) -> None:
    """Litter is removed, and a damaged checkpoint set aside; the recorded settings stay those of the start."""
    run_dir = tmp_path / "run"
    found = opened(
        run_dir,
        Opening(AUTO),  # nothing is there
        Opening(),
        Opening(RESUME),  # but it has not saved anything
        Opening(AUTO),
        Opening(AUTO, save),
        Opening(RESUME | {"lr": 0.01}, leave_litter),
        Opening(RESUME, cut_newest),
    )
    there = (
        f"--run-dir {run_dir} holds a run: give --resume to continue it, --overwrite to delete it, or another folder"
    )
    nothing = f"--resume: {run_dir} holds no checkpoint, the run ended before its first: start again with --overwrite"
    assert found == [None, there, nothing, None, NEWER, NEWER, OLDER]
    assert {path.name for path in (run_dir / FOLDER).iterdir()} == {OLDER, f"damaged-{NEWER}"}
    assert not (run_dir / REQUEUE_FILE).exists()
    assert json.loads((run_dir / CONFIG_FILE).read_text())["config"]["lr"] != 0.01  # it is that of the start
    assert opened(run_dir, Opening({"overwrite": True}), Opening(RESUME)) == [None, nothing]
    assert json.loads((run_dir / CONFIG_FILE).read_text())["config"]["overwrite"] is True
    assert not (run_dir / FOLDER).exists()


def config_with(**settings: Any) -> TrainConfig:
    return small(**SETTINGS | settings)


def test_differences_are_a_line_each_but_for_what_cannot_change_the_result() -> None:
    config = config_with(run_dir=Path("a"), lr=0.1)
    before, now = config.as_json(), config_with(run_dir=Path("b"), lr=0.2, resume=True, grad_accumulation_steps=2)
    assert differences(before, config) == []
    assert differences(before, now) == ["--lr was 0.1 and is now 0.2", "--grad-accumulation-steps was 1 and is now 2"]
    assert differences(before, dataclasses.replace(config, seed=7)) == []  # refused elsewhere


def test_settings_whose_flags_were_not_given_are_no_difference() -> None:
    longer = config_with(
        epochs=9, strategy="handwritten", grad_accumulation_steps=1
    )  # the warm-up and the all-reduce follow
    given = config_with(epochs=4, warmup_epochs=0.5)
    told = ["--epochs was 4 and is now 9", "--strategy was torch and is now handwritten"]
    assert differences(config_with(epochs=4).as_json(), longer) == told
    assert differences(given.as_json(), longer) == [told[0], "--warmup-epochs was 0.5 and is now 1.0", told[1]]
