"""ddp/checkpoint/state.py: a checkpoint restores the state of each rank, or averages for another number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from common.distributed.process_group import process_group
from ddp.checkpoint import storage
from ddp.checkpoint.state import manifest_of, restore, saved_buffers, state_of_job, state_of_rank
from ddp.config import TrainConfig
from ddp.data import load_data
from ddp.job import Job
from ddp.train import build_job
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
