"""common/files/run_directory.py: which folders are accepted or refused, and that only a run's files are deleted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from common.errors import UsageError
from common.files.atomic_files import write_json
from common.files.run_directory import CHECKPOINT, CONFIG_FILE, LOCK_FILE, LOG_FOLDER, prepare, require_lock
from ddp.checkpoint.directory import NAME


def absent(folder: Path) -> None:
    pass


def empty(folder: Path) -> None:
    folder.mkdir()


def run(folder: Path) -> None:
    prepare(folder, resume=False, overwrite=False).close()
    write_json(folder / CONFIG_FILE, {"dataset_fingerprint": "0123"})
    (folder / "model.pt").write_bytes(b"weights")


def other(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")


def other_with_a_config_and_checkpoints(folder: Path) -> None:
    other_with_a_config(folder)
    (folder / "thesis.tex").unlink()
    put(folder, ["checkpoints/step-00000010/manifest.json"])


def other_with_a_config(folder: Path) -> None:
    """A folder as Hugging Face saves a model."""
    other(folder)
    (folder / CONFIG_FILE).write_text('{"model_type": "bert"}')
    (folder / LOG_FOLDER).mkdir()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("state", [absent, empty])
def test_a_new_or_empty_folder_becomes_a_runs(state: Callable[[Path], None], overwrite: bool, tmp_path: Path) -> None:
    state(tmp_path / "run")
    prepare(tmp_path / "run", resume=False, overwrite=overwrite).close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [LOCK_FILE, LOG_FOLDER]


def test_what_a_run_left_that_was_killed_before_it_began_is_accepted(tmp_path: Path) -> None:
    prepare(tmp_path, overwrite=False).close()
    (tmp_path / f".{CONFIG_FILE}.{'0a' * 16}").write_text("{")
    prepare(tmp_path, overwrite=False).close()
    assert content(tmp_path).keys() == {LOCK_FILE}


def test_resume_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    run(tmp_path / "run")
    before = content(tmp_path / "run")
    prepare(tmp_path / "run", resume=True, overwrite=False).close()
    assert content(tmp_path / "run") == before


NOT_A_RUN = "--run-dir {} holds something that is not a run: give another, or an empty one"
NO_RUN = "--resume: {} holds no run; start it without --resume, or name its --run-dir"


@pytest.mark.parametrize(
    "state, resume, overwrite, message",
    [
        (
            run,
            False,
            False,
            "--run-dir {} holds a run: give --resume to continue it, --overwrite to delete it, or another folder",
        ),
        (absent, True, False, NO_RUN),
        (empty, True, False, NO_RUN),
        (other, False, False, NOT_A_RUN),
        (other, False, True, NOT_A_RUN),
        (other_with_a_config, False, True, NOT_A_RUN),
        (other_with_a_config_and_checkpoints, False, True, NOT_A_RUN),
    ],
)
def test_a_refusal_names_the_folder_and_what_to_do_and_changes_nothing(
    state: Callable[[Path], None], resume: bool, overwrite: bool, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    state(folder)
    before = content(tmp_path)
    with pytest.raises(UsageError) as error:
        prepare(folder, resume=resume, overwrite=overwrite)
    assert str(error.value) == message.format(folder)
    assert content(tmp_path) == before


WRITTEN = (
    "metrics.jsonl", "launch.json", "requeue.json", "result.json", "curves.png", "confusion.png", "samples.png",
    "logs/rank0.log", "logs/rank12.log", "logs/flight-recorder/2026-11-24T05-53-10-9a3adeeb/rank1",
    "tensorboard/events.out.tfevents.1790000000.host.12.0", "profile/rank0.json.gz",
    "checkpoints/epoch-0001-step-00000010/model.pt", "checkpoints/epoch-0001-step-00000010/manifest.json",
    "checkpoints/epoch-0001-step-00000010/SHA256SUMS", "checkpoints/damaged-epoch-0001-step-00000010-2/ranks.pt",
    "checkpoints/.saving-0123/model.pt", "checkpoints/.removed-0123/model.pt", f".config.json.{'0a' * 16}",
    "checkpoints/.replaced-epoch-0001-step-00000010-0123/optimizer.pt", "checkpoints/step-00000010.pt",
)  # fmt: skip
FOREIGN = (
    "notes.txt", "logs/notes.txt", "checkpoints/epoch-0001-step-00000010/notes.txt", "checkpoints/epoch-1/model.pt",
    "other-run/config.json", "thesis/metrics.jsonl", "profile/rank0.json", "lock2", "model.pt.bak",
)  # fmt: skip


def put(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("something")


def test_overwrite_deletes_all_that_a_run_writes(tmp_path: Path) -> None:
    """Overwrite deletes all that a run writes, and nothing beside it.

    Claim (ddp/resilience/README.md): `--overwrite` deletes what a run writes, and refuses all else by name.
    """
    run(tmp_path / "run")
    put(tmp_path, [*(f"run/{name}" for name in WRITTEN), "neighbour"])
    prepare(tmp_path / "run", overwrite=True).close()
    assert content(tmp_path).keys() == {f"run/{LOCK_FILE}", "neighbour"}


@pytest.mark.parametrize("name", FOREIGN)
def test_overwrite_refuses_a_folder_that_holds_something_else_and_names_it(name: str, tmp_path: Path) -> None:
    """Overwrite refuses a folder that holds something else and names it.

    Claim (ddp/resilience/README.md): `--overwrite` deletes what a run writes, and refuses all else by name.
    """
    run(tmp_path)
    put(tmp_path, (*WRITTEN, name))
    before = content(tmp_path)
    with pytest.raises(
        UsageError, match=rf"^--overwrite: {tmp_path} also holds .*{name.split('/')[-1]}.*, which no run has"
    ):
        prepare(tmp_path, overwrite=True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("link", ["metrics.jsonl", "checkpoints", "logs/rank0.log"])
def test_overwrite_refuses_a_link(link: str, tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"also holds {link}, which no run has written"):
        prepare(tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 10**5, b"\xff\xfe", b"{}", None])
def test_without_a_whole_config_the_checkpoints_make_it_a_run(damage: bytes | None, tmp_path: Path) -> None:
    run(tmp_path)
    put(tmp_path, ["checkpoints/epoch-0001-step-00000010/manifest.json"])
    (tmp_path / CONFIG_FILE).unlink()
    if damage is not None:
        (tmp_path / CONFIG_FILE).write_bytes(damage)
    prepare(tmp_path, overwrite=False, resume=True).close()
    prepare(tmp_path, overwrite=True).close()
    assert content(tmp_path).keys() == {LOCK_FILE}


def test_a_checkpoints_name_is_the_one_that_is_written() -> None:
    assert re.compile(CHECKPOINT, re.ASCII) == NAME


def test_a_lock_that_was_removed_is_noticed_before_anything_is_saved(tmp_path: Path) -> None:
    with prepare(tmp_path, overwrite=False):
        require_lock(tmp_path)
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(UsageError, match=r"lock is no longer this run's but that of no process: it was removed"):
            require_lock(tmp_path)
        (tmp_path / LOCK_FILE).write_text("process 1 on another-host\n")
        with pytest.raises(UsageError, match="but that of process 1 on another-host: it was removed"):
            require_lock(tmp_path)
