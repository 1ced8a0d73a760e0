"""``ddp.data``: which loader a rank has, on its CPU or GPU, and with how many workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.data.datasets import ImageDataset, load
from common.data.on_device import ImagesOnDevice
from common.distributed.dist_env import DistEnv
from common.reporting.report import data_verdict
from dataloading.dataset.training_data import load_lfw
from dataloading.loader.fast_loader import FastLoader
from ddp.config import TrainConfig
from ddp.data import default_workers, faster_loading, open_loader
from ddp.sampler import ShardSampler
from tests.ddp.test_files import write_people
from tests.support.fake_gpu import CUDA, FakeGpu

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "workers"),
    [(CPU, 64, 2, 1), (CUDA, 64, 8, 7), (CUDA, 12, 4, 2), (CUDA, 2, 2, 1), (CUDA, 1, 1, 1), (CUDA, 256, 2, 16)],
)
def test_on_a_gpu_the_workers_have_the_rank_s_cores_but_one(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, cores: int, ranks: int, workers: int
) -> None:
    """On a GPU the workers have the rank's cores but one.

    Claim (dataloading/README.md, 9): on a GPU the workers have the rank's cores but one.
    """
    monkeypatch.setattr("common.distributed.dist_env.usable_cores", lambda _=0: cores)
    assert default_workers(DistEnv(0, 0, ranks, ranks, device, "nccl", "host")) == workers


def opened(images: Any, device: torch.device, config: TrainConfig) -> Any:
    return open_loader(images, ShardSampler(len(images), 4, 1, 0), DistEnv.alone(device), config)


@pytest.fixture
def in_memory() -> ImageDataset:
    half = load("glyphs", train_samples=20, test_samples=4).train
    assert isinstance(half, ImageDataset)
    return half


def test_on_the_cpu_data_in_memory_is_loaded_as_it_is(in_memory: ImageDataset) -> None:
    for workers in (0, 2):
        loader = opened(in_memory, CPU, TrainConfig(workers=workers))
        assert (loader.dataset, loader.num_workers, loader.pin_memory) == (in_memory, workers, False)


def test_on_a_gpu_data_in_memory_is_kept_there_unless_workers_are_asked_for(
    in_memory: ImageDataset, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    keep = ImagesOnDevice.__init__
    monkeypatch.setattr(ImagesOnDevice, "__init__", lambda self, images, device: keep(self, images, CPU))
    kept, sent = (opened(in_memory, CUDA, TrainConfig(workers=workers)) for workers in (0, 2))
    assert isinstance(kept.dataset, ImagesOnDevice) and not kept.pin_memory
    assert sent.dataset is in_memory and sent.pin_memory
    assert faster_loading(TrainConfig(), in_memory, kept) == []


def test_images_in_files_are_loaded_by_threads_that_fill_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu
) -> None:
    """Images in files are loaded by one thread on the CPU, and by several that fill pinned memory on a GPU, to the same batches.

    Claim (dataloading/README.md, 9): on a GPU the workers have the rank's cores but one.
    """
    monkeypatch.setattr("common.distributed.dist_env.usable_cores", lambda _=0: 4)
    folder = write_people(tmp_path / "faces", people=2, images=5, side=24)
    images = load_lfw(str(folder), min_images_per_person=2, image_size=16).train
    config = TrainConfig(dataset="lfw")
    loaders = [opened(images, device, config) for device in (CPU, CUDA)]
    for loader, device, workers in zip(loaders, (None, CUDA), (1, 3), strict=True):
        assert isinstance(loader, FastLoader)
        assert (loader.num_workers, loader.device) == (workers, device)
    expected, late = map(list, loaders)
    assert fake_gpu.ever_pinned
    for batch, same in zip(late, expected, strict=True):
        assert torch.equal(batch.images, same.images) and torch.equal(batch.labels, same.labels)


@pytest.mark.parametrize(
    ("settings", "workers", "advice"),
    [
        ({}, 0, "try --workers 2"),
        (
            {"dataset": "lfw", "loader": "stock", "workers": 0},
            0,
            "try --workers 2 or --loader fast or --decoder simplejpeg",
        ),
        ({"dataset": "lfw", "decoder": "simplejpeg"}, 15, "try more than --workers 15"),
    ],
)
def test_images_in_files_can_be_had_faster_in_more_ways(settings: dict[str, Any], workers: int, advice: str) -> None:
    loader: Any = SimpleNamespace(dataset=None, num_workers=workers)
    remedies = faster_loading(TrainConfig(**settings), loader.dataset, loader)
    assert data_verdict(0.5, remedies).endswith(f"waits for data; {advice}")
