"""What a run learns from, and the loader that brings it its batches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from common import fashion_mnist
from common.datasets import Batch, BatchKey, ImageData, Images, keep_batch
from common.loader_workers import poll_for_deaths, start_worker
from common.process_group import Place
from common.recipes import load_in_memory, require_a_batch
from dataloading import face_cache
from dataloading.batches import LFWBatches
from dataloading.fast_loader import FastLoader
from dataloading.training_data import load_lfw
from ddp.config import Loading, TrainConfig

Loader = DataLoader[Batch] | FastLoader


def load_data(config: TrainConfig, place: Place) -> ImageData:
    """Every rank holds the data set; one process per node fetches or draws it, while the others wait."""
    with place.together():
        if place.local_rank == 0 and config.download:
            fashion_mnist.download(Path(config.data_dir))
        if place.local_rank == 0 and config.dataset == "lfw" and not config.data_dir:
            face_cache.ensure()
    with place.together():
        if config.dataset == "lfw":
            data = load_lfw(
                config.data_dir,
                min_images_per_person=config.min_images_per_person,
                image_size=config.image_size,
                augmentation=config.augmentation,
                seed=config.seed,
                train_samples=config.train_samples,
                test_samples=config.test_samples,
                decoder=config.decoder,
            )
        else:
            data = load_in_memory(config)
        require_a_batch(config, data)
    return data


def open_loader(images: Images, batch_sampler: Iterable[BatchKey], device: torch.device, loading: Loading) -> Loader:
    """The loader that brings the batches a sampler asks for: torch's own, or for images in files the fast one."""
    pin_memory = device.type == "cuda"
    if loading.loader == "fast":
        assert isinstance(images, LFWBatches)
        return FastLoader(
            images,
            batch_sampler=batch_sampler,
            num_workers=loading.workers,
            persistent_workers=loading.persistent,
            pin_memory=pin_memory,
        )
    poll_for_deaths()
    return DataLoader(
        images,  # type: ignore[arg-type]  # of torch's Dataset it needs nothing
        batch_sampler=batch_sampler,  # type: ignore[arg-type]  # torch expects lists of indices, but passes on what it gets
        collate_fn=keep_batch,  # type: ignore[arg-type]
        num_workers=loading.workers,
        worker_init_fn=start_worker,
        persistent_workers=loading.persistent and loading.workers > 0,
        pin_memory=pin_memory,
    )
