"""The data set of a run, and the loader of its batches.

``dataloading`` is imported here and nowhere else in ``ddp``, and only for images in files.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common.data import fashion_mnist
from common.data.datasets import ImageData, Images, Loader, keep_batch
from common.data.loaders import require_room_for_workers, stock_loader
from common.data.on_device import kept_on_device
from common.distributed.dist_env import DistEnv
from common.training.evaluation import evaluation_batch_size
from common.training.recipes import load_dataset, require_a_batch
from ddp import sums
from ddp.config import FROM_FILES, TEXT, TrainConfig
from ddp.sampler import MicroBatchSampler, ShardSampler

MOST_DEFAULT_WORKERS = 16  # of a rank: a batch of 48 images leaves each but three


def load_data(config: TrainConfig, env: DistEnv) -> ImageData:
    """Load the data set on every rank. One process per node downloads or draws it first, while the others wait."""
    with env.fail_together():
        if env.local_rank == 0 and config.download:
            fashion_mnist.download(Path(config.data_dir))
        if env.local_rank == 0 and config.dataset == "lfw" and not config.data_dir:
            from dataloading.synthetic import face_cache

            face_cache.ensure()
    with env.fail_together():
        if config.dataset == TEXT:
            data: ImageData = sums.load(config.train_samples, config.test_samples)
        else:
            data = load_files(config) if config.dataset in FROM_FILES else load_dataset(config)
        require_a_batch(config, data, env.world_size * config.grad_accumulation_steps)
    env.require_same(training_samples=len(data.train), digest_of_the_data=data.fingerprint)
    return data


def load_files(config: TrainConfig) -> ImageData:
    """A data set of image files: ``lfw`` or ``folder``."""
    from dataloading.dataset.training_data import load_folder, load_lfw

    taken: dict[str, Any] = {
        "image_size": config.image_size,
        "augmentation": config.augmentation,
        "seed": config.seed,
        "train_samples": config.train_samples,
        "test_samples": config.test_samples,
    }
    if config.dataset == "folder":
        return load_folder(config.data_dir, **taken)
    people = config.min_images_per_person
    return load_lfw(config.data_dir, min_images_per_person=people, decoder=config.decoder, **taken)


def open_loaders(
    data: ImageData, sampler: MicroBatchSampler, env: DistEnv, config: TrainConfig
) -> tuple[Loader, Loader]:
    """The loaders of this rank's micro-batches and of its shard of the test set; see :func:`open_loader`."""
    return open_loader(data.train, sampler, env, config), open_test_loader(data, env, config)


def open_loader(
    images: Images, batch_sampler: MicroBatchSampler | ShardSampler, env: DistEnv, config: TrainConfig
) -> Loader:
    """The loader of the batches that a sampler asks for: torch's own, or for images in files the fast one. A collective.

    :raises UsageError: on every rank, when a node cannot hold so many workers
    """
    workers = default_workers(env) if config.workers is None else config.workers
    with env.fail_together():
        if config.loader == "fast":
            from dataloading.dataset.batches import ImageBatches
            from dataloading.loader.fast_loader import FastLoader

            assert isinstance(images, ImageBatches)
            require_room_for_workers(workers, env.local_world_size)
            return FastLoader(
                images,
                batch_sampler=batch_sampler,
                num_workers=workers,
                device=env.device,
            )
        source, on_gpu = images, env.device.type == "cuda"
        if on_gpu and workers == 0:
            source = kept_on_device(images, env.device)
        return stock_loader(
            source,
            workers,
            batch_bytes=batch_sampler.micro_batch_size * math.prod(images.shape),
            ranks=env.local_world_size,
            batch_sampler=batch_sampler,
            collate_fn=keep_batch,
            persistent_workers=config.persistent_workers and workers > 0,
            pin_memory=on_gpu and source is images,
        )


def default_workers(env: DistEnv) -> int:
    """Loader workers of this rank for images in files. On the CPU, training takes the cores. On a GPU it takes one of them, to
    queue its kernels, and the workers have the others."""
    return 1 if env.device.type == "cpu" else min(max(1, env.share_of_cores - 1), MOST_DEFAULT_WORKERS)


def faster_loading(config: TrainConfig, images: Images, loader: Loader) -> list[str]:
    """The flags that may bring batches sooner: more workers and, for images in files, what decodes them faster.

    :param images: for which the loader was opened
    """
    if loader.dataset is not images:  # they are kept on the GPU
        return []
    workers = f"more than --workers {loader.num_workers}" if loader.num_workers else "--workers 2"
    flags = {"--loader fast": config.loader == "stock", "--decoder simplejpeg": config.decoder == "pillow"}
    return [workers, *(flag for flag, helps in flags.items() if helps and config.dataset in FROM_FILES)]


def open_test_loader(data: ImageData, env: DistEnv, config: TrainConfig) -> Loader:
    """A loader of this rank's shard of the test set."""
    shard = ShardSampler(len(data.test), evaluation_batch_size(data.shape, env.device), env.world_size, env.rank)
    return open_loader(data.test, shard, env, config)
