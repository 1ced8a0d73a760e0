"""``python -m ddp.bench scaling``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.training.recipes import load_dataset
from ddp.bench.scaling import COMPUTE, SINGLE, SYNCHRONIZATION, Config, TrainingWorker, Way, causes, ways
from ddp.config import TrainConfig
from ddp.rendezvous.worker_group import WorkerGroup
from tests.ddp.jobs import small
from tests.support.launch import run_command


def test_the_causes_add_up_to_what_is_lost() -> None:
    """The excess of two processes that send nothing is compute; the rest is synchronization."""
    seconds = {
        SINGLE: [1.0, 1.2, 1.1],
        "two": [0.7, 0.8, 0.9],
        "two, nothing sent": [0.6, 0.7, 0.65],
        "threads": [0.8] * 3,
    }
    assert causes(Way("two", "ddp", 2, 2, 1), seconds) == pytest.approx({COMPUTE: 0.65 - 0.55, SYNCHRONIZATION: 0.15})
    assert causes(Way("threads", "none", 2, 1, 2), seconds) == pytest.approx({COMPUTE: 0.25, SYNCHRONIZATION: 0.0})


def test_the_ways_on_cpus() -> None:
    """On CPUs, DDP is compared with each number of processes, and DataParallel with the largest."""
    config = Config(device="cpu", processes=(4, 1, 2))
    names = [way.name for way in ways(config)]
    assert names[-3:] == ["DDP, 1 process", "DDP, 2 processes", "DDP, 4 processes"]
    assert names[2] == "dataparallel, 4 CPU devices"
    assert len(ways(Config(device="cpu", processes=(1,)))) == 2


@pytest.mark.parametrize("wrapper", ["ddp", "ddp, nothing sent"])
def test_ranks_train_alike_only_if_gradients_are_sent(wrapper: str) -> None:
    """Without sums, each rank follows its own samples."""
    config: TrainConfig = small(epochs=10**6)
    with WorkerGroup(2, Summing, config, load_dataset(config), wrapper, 1) as job:
        assert min(job.call("run", 2)) > 0
        one, other = job.call("sum_of_weights")
    assert (one == other) == (wrapper == "ddp")


class Summing(TrainingWorker):
    """A rank that tells its weights."""

    def sum_of_weights(self) -> float:
        """Sum all parameters."""
        return sum(float(parameter.double().sum()) for parameter in self._model.parameters())


@pytest.mark.examples
def test_every_way_is_measured(tmp_path: Path) -> None:
    """The bench measures all ways on this machine, and the processes that send nothing."""
    flags = "--device cpu --processes 1,2 --builds 1 --rounds 2 --steps 1 --output"
    done = run_command("ddp.bench", "scaling", *flags.split(), str(tmp_path), timeout_s=280)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "scaling.json").read_text())
    names = [way["name"] for way in written["ways"]]
    assert {*written["seconds"]} == {*names, "DDP, 2 processes, nothing sent"}
    assert all(name in done.stdout for name in names)
    assert (tmp_path / "lost.png").is_file()
