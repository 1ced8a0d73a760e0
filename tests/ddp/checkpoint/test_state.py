"""ddp/checkpoint/state.py: a checkpoint restores the state of each rank, or averages for another number of ranks."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from common.command_line.cli import from_settings
from common.distributed.dist_env import find_dist_env
from common.errors import UsageError
from ddp.checkpoint import load, storage
from ddp.checkpoint.folder import Damaged
from ddp.checkpoint.state import copy_on_host, manifest_of, restore, saved_buffers, state_of_job, state_of_rank
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.evaluate import settings_of_run
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from ddp.train import build_job
from tests.ddp.checkpoint.samples import forge
from tests.ddp.jobs import newest, small, start
from tests.support.launch import run_ranks


@dataclasses.dataclass
class Held:
    """The state of a rank, before it was saved or after it was restored."""

    weights: dict[str, Any]
    optimizer: list[Any]
    hyperparameters: dict[str, Any]
    buffers: dict[str, Any]
    window: tuple[float, ...]
    numbers: tuple[int, int, int, int]


def held(job: Job) -> Held:
    group = job.optimizer.param_groups[0]
    return Held(
        {name: value.detach().numpy().copy() for name, value in job.network.named_parameters()},
        [state["momentum_buffer"].numpy().copy() for state in job.optimizer.state_dict()["state"].values()],
        {name: group[name] for name in ("lr", "momentum", "weight_decay")},
        {name: value.numpy().copy() for name, value in job.network.named_buffers()},
        tuple(job.window.state())[:3],
        (job.step, job.epoch, job.step_in_epoch, job.skipped_steps),
    )


SETTINGS: dict[str, Any] = {"train_samples": 120, "test_samples": 20, "batch_size": 24}


def trained_and_saved(folder: Path) -> Held:
    """Two steps, in the middle of an epoch."""
    with process_group(threads=1) as env:
        config = small(**SETTINGS, run_dir=folder)
        job, _ = start(config, env, steps=2)
        job.skipped_steps = 3
        ranks: list[Any] = [None] * env.world_size
        dist.all_gather_object(ranks, state_of_rank(job))
        if env.is_main:
            storage.write(folder, manifest_of(job), state_of_job(job, ranks))
        return held(job)


def restored(config: TrainConfig) -> Held:
    with process_group(threads=1) as env:
        found = newest(config.run_dir)
        job = build_job(config, env, load_data(config, env), found)
        restore(job, *found)
        return held(job)


def test_ranks_are_restored_and_another_number_of_ranks_gets_averages(tmp_path: Path) -> None:
    before = run_ranks(trained_and_saved, 2, tmp_path)
    name = "features.1.running_mean"
    assert not np.array_equal(before[0].buffers[name], before[1].buffers[name])
    for after, expected in zip(run_ranks(restored, 2, small(**SETTINGS, run_dir=tmp_path)), before, strict=True):
        np.testing.assert_equal(dataclasses.asdict(after), dataclasses.asdict(expected))

    changed = small(**SETTINGS, run_dir=tmp_path, momentum=0.5, weight_decay=0.25)
    others = run_ranks(restored, 3, changed)
    for after in others:
        np.testing.assert_equal(after.weights, before[0].weights)
        np.testing.assert_equal(after.optimizer, before[0].optimizer)
        changes = {"momentum": 0.5, "weight_decay": 0.25}  # those of the resumed run
        assert after.hyperparameters == before[0].hyperparameters | changes
        assert after.numbers == (2, 0, 2, 3)
        for name, value in after.buffers.items():
            expected = np.mean([rank.buffers[name] for rank in before], 0)
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7, err_msg=name)
    sums = [np.sum([rank.window for rank in ranks], 0) for ranks in (others, before)]
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-12)
    assert sums[1][2] == 48


def test_within_an_epoch_the_saved_model_has_batchnorm_s_averages_and_rank_0_s_other_buffers() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True))
    network.register_buffer("last", torch.zeros(4)[::2])
    buffers = dict(network.named_buffers())
    ranks = [{"buffers": dict.fromkeys(buffers, torch.full((2,), rank))} for rank in (1.0, 2.0)]
    saved = saved_buffers(Mock(named_module=network, step_in_epoch=1), ranks)
    assert saved["0.running_mean"].tolist() == [1.5, 1.5]
    assert torch.equal(saved["1.running_mean"], buffers["1.running_mean"])
    assert saved["last"].is_contiguous()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_holds_the_state_at_the_time_of_the_call(device: str) -> None:
    """Also where the device is behind when it is taken. It lies in memory as its source."""
    weights = torch.zeros(1 << 8, 3, 1 << 6, 1 << 6, device=device).to(memory_format=torch.channels_last)
    if device == "cuda":
        torch.cuda._sleep(50_000_000)
    weights.add_(1)
    copy = copy_on_host({"model": [weights, 0.1]}, torch.device(device))
    weights.mul_(-1)
    assert (copy["model"][0] == 1).all() and copy["model"][1] == 0.1
    assert copy["model"][0].stride() == weights.stride()


# Contents that do not fit the job


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Path]]:
    """A job of one rank after one step, and its checkpoint, which no test changes."""
    folder = tmp_path_factory.mktemp("whole")
    with process_group(threads=1):
        job, _ = start(small(**SETTINGS, run_dir=folder), find_dist_env("cpu"), steps=1)
        yield job, storage.write(folder, manifest_of(job), state_of_job(job, [state_of_rank(job)]))


@pytest.fixture
def path(whole: tuple[Job, Path], tmp_path: Path) -> Path:
    """A copy of that checkpoint, to be forged."""
    return Path(shutil.copytree(whole[1], tmp_path / whole[1].name))


def take_up(job: Job, path: Path) -> None:
    manifest = storage.verify(path)
    storage.load_weights(job.network, path)
    restore(job, path, manifest)


MOMENTUM = ("state", 0, "momentum_buffer")


@pytest.mark.parametrize(
    ("kind", "place", "value", "problem"),
    [
        ("optimizer", MOMENTUM, torch.zeros(3), r"has momentum_buffer:features\.0\.weight of shape \[3\] instead of"),
        ("optimizer", MOMENTUM, torch.zeros(32, 1, 3, 3, dtype=torch.int8), "in torch.int8 instead of torch.float32"),
        ("optimizer", ("state", 0), {"exp_avg": torch.zeros(3)}, r"has exp_avg:features\.0\.weight, which the run has not"),
        ("model", ("extra",), torch.zeros(3), r'another model \(Unexpected key\(s\) in state_dict: "extra"'),
        ("model", ("features.0.weight",), torch.zeros(3), r"other data than is there now.* \(size mismatch for features\.0"),
    ],
)  # fmt: skip
def test_contents_that_do_not_fit_are_refused(
    whole: tuple[Job, Path], path: Path, kind: str, place: tuple[Any, ...], value: Any, problem: str
) -> None:
    """Contents of another shape, dtype or name are refused with their place, whatever the digests say.

    Claim (ddp/README.md, 9): contents that do not fit the job are refused.
    """
    job, _ = whole
    content = copy.deepcopy(load(path, kind))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    torch.save(content, path / f"{kind}.pt")
    forge(path)
    with pytest.raises(UsageError, match=problem):
        take_up(job, path)


def test_settings_of_another_version_are_refused_by_evaluation(path: Path) -> None:
    config = json.loads((path / "manifest.json").read_bytes())["facts"]["config"]
    for change, words in (({"speed": 3}, "--speed=3"), ({"lr": "fast"}, "--lr"), ({"model": 5}, "--model")):
        forge(path, config=config | change)
        with pytest.raises(Damaged, match=f"has settings that this version does not take: .*{words}"):
            settings_of_run(path, storage.verify(path))


def test_settings_come_back_from_json() -> None:
    others: list[dict[str, Any]] = [
        {"augment": False, "precision": "fp16", "clip_norm": 1.0},
        {"dataset": "lfw", "resume": True},
    ]
    for settings in ({}, *others):
        config = TrainConfig(**settings)
        assert from_settings(TrainConfig, "ddp.train", json.loads(json.dumps(config.as_json()))) == config
