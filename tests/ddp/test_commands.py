"""The commands of ddp as a person types them: what they leave behind, and what they say of a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from common.training.metrics import read_metrics
from ddp import train
from tests.support.launch import run_forked, run_torchrun
from tests.support.user_errors import UserError

TINY = ("--train-samples", "432", "--test-samples", "101", "--epochs", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run of two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    arguments = (*TINY, "--batch-size", "48", "--log-every", "4", "--run-dir", str(folder))
    done = run_torchrun(2, "ddp.train", *arguments, env={"OMP_NUM_THREADS": "1"})  # set, torchrun does not talk of it
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


def test_it_ends_with_a_summary(finished: Path) -> None:
    lines = (finished / "stdout").read_text().splitlines()
    assert lines[0].startswith("test accuracy ")
    assert lines[0].endswith("of 101 samples)")
    assert "images/s" in lines[1]
    assert "of each step waits for data" in lines[2]
    assert str(finished) in lines[3]
    assert len(lines) == 4  # once, not once per rank


def test_it_warns_of_nothing(finished: Path) -> None:
    lines = (finished / "stderr").read_text().splitlines()
    assert [line for line in lines if " INFO " not in line] == []


def test_the_run_directory_has_everything(finished: Path) -> None:
    config = json.loads((finished / "config.json").read_text())
    assert config["config"]["batch_size"] == 48
    assert config["world_size"] == 2
    assert {"torch", "python", "processor", "usable_cores", "git_commit", "command"} <= config["machine"].keys()
    result = json.loads((finished / "result.json").read_text())
    assert result["test"]["samples"] == 101
    for figure in ("curves.png", "confusion.png", "samples.png"):
        with Image.open(finished / figure) as image:
            assert min(image.size) > 400
    for rank in range(2):
        assert (finished / "logs" / f"rank{rank}.log").is_file()
    records = read_metrics(finished)
    assert [r["step"] for r in records if r["kind"] == "step"] == [4, 8, 9]
    assert [r["step"] for r in records if r["kind"] == "epoch"] == [9]


def test_evaluate_repeats_its_result_at_another_world_size(finished: Path) -> None:
    """``ddp.evaluate`` finds the training's accuracy at another world size.

    Claim (ddp/README.md, 8): evaluation is exact, at another world size too.
    """
    expected = json.loads((finished / "result.json").read_text())["test"]
    flags = ("--run-dir", str(finished), "--checkpoint", "best", "--device", "cpu")
    done, *_ = run_forked("ddp.evaluate", *flags, world_size=3)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].startswith(f"accuracy {100 * expected['accuracy']:.2f} %: ")
    assert lines[-1].endswith(f"loss {expected['loss']:.4f}")
    assert len(lines) == 12  # a header, ten classes, the total
    (done,) = run_forked("ddp.evaluate", *flags, "--test-samples", "150")  # more than the run did
    assert " of 150 samples" in done.stdout


def test_a_finished_run_is_resumed_to_its_own_end(finished: Path) -> None:
    """Also if its config.json is damaged, which is then written anew."""
    (finished / "config.json").write_text("{")
    arguments = (*TINY, "--batch-size", "48", "--run-dir", str(finished), "--resume")
    (done,) = run_forked("ddp.train", *arguments)
    assert done.returncode == 0, done.stderr
    assert "config.json was damaged: it now has the settings of this start" in done.stderr
    assert json.loads((finished / "config.json").read_text())["config"]["batch_size"] == 48
    assert done.stdout.splitlines()[0] == (finished / "stdout").read_text().splitlines()[0]


# Mistakes


def test_after_a_refused_start_the_corrected_one_finds_an_empty_directory(
    user_error: UserError, tmp_path: Path
) -> None:
    """After a refused start the corrected one finds an empty directory.

    Claim (ddp/resilience/README.md): a start that is refused leaves nothing in the way of the next.
    """
    small = ("--train-samples", "96", "--test-samples", "10", "--batch-size", "48", "--run-dir", str(tmp_path / "run"))
    line = user_error(train.main, *small, "--epochs", "1", "--device", "cpu", "--model", "json:dumps")
    assert "--model json:dumps takes other arguments" in line
    assert run_forked("ddp.train", *small, "--epochs", "1", "--device", "cpu")[0].returncode == 0
