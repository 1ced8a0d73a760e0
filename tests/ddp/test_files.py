"""Training from files: the same result by every loader, exact resumption, and one line for a file that is damaged."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from common.errors import UsageError
from common.signals.stop_request import REQUEUE
from common.training.evaluation import evaluate
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.training_data import load_lfw
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.train import build_job, train_epoch
from tests.ddp.jobs import Outcome, assert_identical, final_state, run_job, train_epochs
from tests.support.launch import error_lines, run_forked, run_ranks, start_command

SMALL: dict[str, Any] = {
    "min_images_per_person": 2,
    "image_size": 16,
    "epochs": 2,
    "batch_size": 12,
    "model": "fashion-cnn",
    "lr": 0.02,
}
FLAGS = ("--min-images-per-person", "2", "--image-size", "16", "--model", "fashion-cnn", "--device", "cpu")


def write_people(folder: Path, people: int, images: int, side: int) -> Path:
    """Each person is a colour, with some noise."""
    for person in range(people):
        (folder / f"Person_{person}").mkdir(parents=True)
        for number in range(1, images + 1):
            draws = np.random.default_rng([person, number])
            color = np.array([person % 2, person // 2, 1]) * 150
            pixels = (color + draws.integers(0, 60, (side, side, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"Person_{person}" / f"Person_{person}_{number:04d}.jpg")
    return folder


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four people, 48 images for training and 12 for testing."""
    return write_people(tmp_path_factory.mktemp("faces") / "faces", people=4, images=15, side=24)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """544 images for training, more than the mean and standard deviation are taken of."""
    return write_people(tmp_path_factory.mktemp("many") / "many", people=2, images=340, side=16)


def from_files(folder: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(dataset="lfw", data_dir=str(folder), **(SMALL | settings))


@pytest.fixture(scope="module")
def expected(faces: Path) -> Outcome:
    """Two epochs with the stock loader and no workers."""
    return run_ranks(train_epochs, 2, from_files(faces, loader="stock", workers=0))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("loader", "workers", "persistent"),
    [("stock", 2, True), ("fast", 0, True), ("fast", 2, True), ("fast", 2, False)],
)
def test_loaders_and_workers_do_not_change_a_bit(
    faces: Path, expected: Outcome, loader: str, workers: int, persistent: bool
) -> None:
    """Training from files ends with the same bits by every loader and number of workers.

    Claim (dataloading/README.md, 9): training from files gives the same bits by every loader.
    """
    config = from_files(faces, loader=loader, workers=workers, persistent_workers=persistent)
    for outcome in run_ranks(train_epochs, 2, config):
        assert_identical(outcome.parameters, expected.parameters)
        assert outcome.losses == expected.losses
        assert np.array_equal(outcome.confusion, expected.confusion)


def test_resuming_changes_no_bit_whichever_loader_goes_on(faces: Path, tmp_path: Path) -> None:
    """A run on files is resumed to the same bits, whichever loader goes on.

    Claim (dataloading/README.md, 9): training from files is resumed to the same bits, whichever loader goes on.
    """
    whole = tmp_path / "whole"
    run_ranks(run_job, 2, from_files(faces, run_dir=whole))
    tensors, metrics = final_state(whole)
    for loader in ("fast", "stock"):
        part = shutil.copytree(whole, tmp_path / loader)
        for later in sorted((part / "checkpoints").iterdir())[1:]:
            shutil.rmtree(later)
        run_ranks(run_job, 2, from_files(faces, run_dir=part, resume=True, loader=loader, workers=2))
        resumed_tensors, resumed_metrics = final_state(part)
        assert_identical(resumed_tensors, tensors)
        assert resumed_metrics == metrics


# As a person types it


@pytest.fixture(scope="module")
def finished(faces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    arguments = (*FLAGS, "--dataset", "lfw", "--data-dir", str(faces), "--batch-size", "12", "--lr", "0.02")
    done, _ = run_forked("ddp.train", *arguments, "--run-dir", run_dir, world_size=2)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if " INFO " not in line] == []
    (run_dir / "stdout").write_text(done.stdout)
    return run_dir


def test_a_run_learns_and_says_how_long_it_waited_for_data(finished: Path) -> None:
    lines = (finished / "stdout").read_text().splitlines()
    assert lines[0] == "test accuracy 100.00 % after 15 epochs (12 of 12 samples)"
    assert "of each step waits for data" in lines[2]
    assert len(lines) == 4
    settings = json.loads((finished / "config.json").read_text())["config"]
    assert (settings["loader"], settings["workers"], settings["decoder"]) == ("fast", None, "pillow")
    assert ", --workers 1" in (finished / "logs" / "rank0.log").read_text()
    assert (finished / "samples.png").is_file()


def test_evaluation_of_other_data_is_refused(finished: Path, tmp_path: Path) -> None:
    others = write_people(tmp_path / "others", people=3, images=15, side=24)
    (done,) = run_forked("ddp.evaluate", "--run-dir", finished, "--data-dir", others, "--device", "cpu")
    assert done.returncode == 2
    assert "trained on other data than is there now" in error_lines(done.stderr)[0]


@pytest.mark.faults
@pytest.mark.parametrize(("loader", "processes"), [("stock", 4), ("fast", 0)])  # the fast loader has threads
def test_no_worker_is_left_when_training_is_stopped(many: Path, tmp_path: Path, loader: str, processes: int) -> None:
    arguments = (*FLAGS, "--dataset", "lfw", "--data-dir", str(many), "--batch-size", "2", "--epochs", "100000")
    loading = ("--loader", loader, "--workers", "2")
    with start_command("ddp.train", *arguments, *loading, "--run-dir", str(tmp_path / "run")) as process:
        deadline = time.monotonic() + 60
        children: list[psutil.Process] = []
        # A checkpoint comes after the first evaluation. Two processes of training and two of evaluation live on after it.
        while not (tmp_path / "run" / "checkpoints").is_dir() or len(children) < processes:
            assert time.monotonic() < deadline, children
            time.sleep(0.1)
            children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == REQUEUE
        assert psutil.wait_procs(children, timeout=10)[1] == []
        assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]


# Damaged files


def damage(folder: Path, half: str) -> Path:
    """Truncate a file that is found only when training or evaluation comes to it: not one of the first, of which the mean
    and standard deviation are taken."""
    images = getattr(load_lfw(str(folder), min_images_per_person=2, image_size=16), half)
    assert isinstance(images, ImageBatches)
    path = folder / images.files.files[len(images) - 1]
    path.write_bytes(path.read_bytes()[:-40])
    return path


def end_of_training(config: TrainConfig) -> tuple[str, bool, int]:
    """The error of a rank in its first epoch, whether it knows that all do, and at which step."""
    with process_group() as env:
        job = build_job(config, env, load_data(config, env))
        with pytest.raises(UsageError) as caught:
            train_epoch(job)
        return str(caught.value), caught.value.seen_by_all, job.step


@pytest.mark.parametrize(("loader", "workers"), [("stock", 1), ("fast", 1)])
def test_a_damaged_file_ends_all_ranks_at_the_same_step(many: Path, tmp_path: Path, loader: str, workers: int) -> None:
    """A damaged file ends all ranks at the same step.

    Claim (ddp/resilience/README.md): a damaged file ends all ranks in the same step.
    """
    folder = shutil.copytree(many, tmp_path / "many")
    path = damage(folder, "train")
    config = from_files(folder, batch_size=32, loader=loader, workers=workers, log_every=2, image_size=16)
    (text, known, step), other = run_ranks(end_of_training, 2, config)
    assert f"{path} is damaged" in text
    assert len(text.splitlines()) == 1
    assert known
    assert other == (text, known, step)


def end_of_evaluation(config: TrainConfig) -> str:
    with process_group() as env:
        job = build_job(config, env, load_data(config, env))
        with pytest.raises(UsageError) as caught:
            evaluate(job.network, job.data, env, config.precision, job.test_loader)
        return str(caught.value)


def test_a_damaged_test_image_ends_all_ranks(faces: Path, tmp_path: Path) -> None:
    path = damage(shutil.copytree(faces, tmp_path / "faces"), "test")
    for text in run_ranks(end_of_evaluation, 3, from_files(tmp_path / "faces", loader="fast", workers=1)):
        assert f"{path} is damaged" in text
