"""dataparallel/train.py: the training of ``ddp.train``, in one process with many devices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dataparallel.train
from common.errors import UsageError
from common.training.metrics import read_metrics
from common.training.recipes import load_dataset
from dataparallel import train
from dataparallel.train import (
    DataParallelConfig,
    DataParallelJob,
    build_job,
    train_epoch,
)
from tests.support.launch import run_forked

CPU = torch.device("cpu")
TINY = ("--train-samples", "288", "--test-samples", "101", "--epochs", "2")
TIMINGS = ("seconds", "images_per_s", "data_wait")


def job_on(devices: int, **settings: Any) -> DataParallelJob:
    """A small job on so many CPU devices."""
    config = DataParallelConfig(**({"train_samples": 720, "test_samples": 10, "dropout": 0.0, "lr": 0.01} | settings))
    return build_job(config, (CPU,) * devices, load_dataset(config))


def numbers_of(run_dir: Path) -> list[dict[str, Any]]:
    """A run's records, without what depends on the clock."""
    return [{k: v for k, v in record.items() if k not in TIMINGS} for record in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run on two CPU devices."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    arguments = ("--devices", "cpu,cpu", "--batch-size", "48", "--log-every", "4", "--run-dir", str(folder))
    (done,) = run_forked("dataparallel.train", *TINY, *arguments)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_one_device_it_is_ddp_train_bit_for_bit(tmp_path: Path, precision: str) -> None:
    """On one device, ``dataparallel.train`` ends with the bits of ``ddp.train``.

    Claim (dataparallel/README.md): on one device it is `ddp.train` bit for bit.
    """
    settings = f"--precision {precision} --optimizer adamw --clip-norm 1 --label-smoothing 0.1 --seed 3"
    arguments = (*TINY, *settings.split(), "--batch-size", "48", "--log-every", "4", "--threads", "1")
    for command, device in (("ddp.train", "--device"), ("dataparallel.train", "--devices")):
        (done,) = run_forked(command, *arguments, device, "cpu", "--run-dir", tmp_path / command)
        assert done.returncode == 0, done.stderr
    (expected_file,) = (tmp_path / "ddp.train" / "checkpoints").glob("epoch-*-step-00000012/model.pt")
    expected = torch.load(expected_file, weights_only=True)
    weights = torch.load(tmp_path / "dataparallel.train" / "model.pt", weights_only=True)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    assert numbers_of(tmp_path / "dataparallel.train") == numbers_of(tmp_path / "ddp.train")


@pytest.mark.parametrize("devices", [2, 3])
def test_devices_agree(devices: int) -> None:
    """The model is one whose samples do not depend on each other, so it has no BatchNorm."""
    alone, divided = job_on(1, model="mlp"), job_on(devices, model="mlp")
    expected, totals = train_epoch(alone, 0), train_epoch(divided, 0)
    assert totals.loss == pytest.approx(expected.loss, rel=1e-5)
    assert totals.samples == 720
    for ours, theirs in zip(divided.network.parameters(), alone.network.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_without_dropout_a_run_on_two_devices_repeats_itself() -> None:
    """Without dropout a run on two devices repeats itself.

    Claim (dataparallel/README.md): without dropout a run on two devices repeats itself.
    """
    one, other = job_on(2), job_on(2)
    assert train_epoch(one, 0).loss == train_epoch(other, 0).loss
    for name, value in one.network.state_dict().items():
        assert torch.equal(value, other.network.state_dict()[name]), name


def test_clipping_sees_unscaled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    clip = torch.nn.utils.clip_grad_norm_

    def spy(parameters: Any, max_norm: float, **options: Any) -> Tensor:
        norms.append(clip(list(parameters), max_norm, **options).item())
        return torch.tensor(norms[-1])

    monkeypatch.setattr(dataparallel.train, "clip_grad_norm_", spy)
    for precision in ("fp32", "fp16"):
        job = job_on(2, model="mlp", precision=precision, clip_norm=0.01, batch_size=8, train_samples=8)
        train_epoch(job, 0)
    assert norms[1] == pytest.approx(norms[0], rel=0.02)  # 65536 times as large were it scaled


@pytest.mark.gpu
@pytest.mark.parametrize("wrapper", ["handwritten", "torch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_all_gpus_learn(tmp_path: Path, wrapper: str, precision: str) -> None:
    gpus = tuple(torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    settings = {"epochs": 2, "train_samples": 1440, "test_samples": 10, "precision": precision, "wrapper": wrapper}
    train.train(DataParallelConfig(**settings, run_dir=tmp_path / "run"), gpus)  # type: ignore[arg-type]
    losses = [record["loss"] for record in read_metrics(tmp_path / "run") if record["kind"] == "epoch"]
    assert losses[1] < losses[0]
    weights = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    assert {value.device for value in weights.values()} == {CPU}


def test_it_ends_with_a_summary_and_the_run_directory_has_everything(finished: Path) -> None:
    lines = (finished / "stdout").read_text().splitlines()
    assert re.fullmatch(r"test accuracy .* of 101 samples\)", lines[0])
    assert "of each step waits for data" in lines[2]
    assert str(finished) in lines[3]
    stderr = (finished / "stderr").read_text().splitlines()
    assert [line for line in stderr if " INFO " not in line] == []
    assert "48 samples on cpu, cpu, fp32" in stderr[0]
    run, result = (json.loads((finished / f"{name}.json").read_text()) for name in ("config", "result"))
    assert run["config"]["devices"] == "cpu,cpu"
    assert (result["epochs"], result["test"]["samples"]) == (2, 101)
    for name in ("curves.png", "confusion.png", "samples.png", "logs/rank0.log"):
        assert (finished / name).is_file()
    weights = torch.load(finished / "model.pt", weights_only=True)
    assert next(iter(weights)) == "features.0.weight"
    records = read_metrics(finished)
    assert [r["step"] for r in records if r["kind"] == "step"] == [4, 6, 8, 12]
    assert [r["test_accuracy"] for r in records if r["kind"] == "epoch"][-1] == result["test"]["accuracy"]


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_room(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_room)
    with pytest.raises(UsageError, match=r"model\.pt cannot be written \(No space left on device\)"):
        train.save(tmp_path / "model.pt", torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
