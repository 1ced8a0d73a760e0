"""The content of a folder of faces, a picture of a batch, and the time that batches take.

    python -m dataloading.lfw_dataset
    python -m dataloading.lfw_dataset --path-to-folder ~/lfw --visualize-batch
    python -m dataloading.lfw_dataset -get_timing -num_workers 1 -batches_to_check 100 -batch_size 512

Without a folder, the commands use drawn faces (dataloading/synthetic/faces.py).
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from common.command_line.cli import command, option, parse
from common.data import DECODERS
from common.data.loaders import loader_errors
from common.distributed.dist_env import require_alone
from common.files.run_directory import prepare_output, results_in
from common.reporting.run_figures import plot_samples
from dataloading.dataset.augmentation import AUGMENTATIONS, course_transform
from dataloading.dataset.batches import collate
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import ShuffledSampler
from dataloading.loader.stock_loader import FLOAT_BYTES, stock_loader
from dataloading.synthetic import face_cache

PASSES = 5
SHOWN = 32


@dataclass(frozen=True)
class LFWConfig:
    """Settings of ``dataloading.lfw_dataset``, each also in the style of ``-num_workers 4``."""

    path_to_folder: str | None = option(None, "folder of the JPEG files (default: drawn faces)")
    batch_size: int = option(32, "images per batch", minimum=1)
    num_workers: int = option(0, "loader processes; 0 loads in the main process", minimum=0)
    visualize_batch: bool = option(False, "draw a batch, with the people's names")
    get_timing: bool = option(False, f"time {PASSES} passes over --batches-to-check batches")
    batches_to_check: int = option(100, "batches of each pass of --get-timing", minimum=1)
    augmentation: str = option("none", "affine is RandomAffine(5, (0.1, 0.1), (0.5, 2.0))", choices=AUGMENTATIONS)
    decoder: str = option("pillow", "decoder of the JPEGs", choices=DECODERS)
    image_size: int | None = option(None, "make every image a square of so many pixels", minimum=1, maximum=4096)
    output: Path = option(Path("runs/lfw-dataset"), "folder of the picture")


@command
def main() -> None:
    config = parse(
        LFWConfig, "dataloading.lfw_dataset", "A folder of JPEG files, and a first look at it.", underscores=True
    )
    require_alone("dataloading.lfw_dataset")
    if config.visualize_batch:
        prepare_output(config.output)
    dataset = LFWDataset(
        config.path_to_folder or face_cache.ensure(),
        transform=course_transform(config.augmentation),
        decoder=config.decoder,
        image_size=config.image_size,
    )
    height, width, _ = dataset.image_shape()
    print(
        f"{dataset.storage.root}: {len(dataset):,} images of {len(dataset.classes):,} people, the first {width}x{height}"
    )
    with loader_errors():
        images, labels = next(iter(_loader(config, dataset, batches=1)))
        print(f"a batch: images {images.dtype} {list(images.shape)}, labels {labels.dtype} {list(labels.shape)}")
        if config.visualize_batch:
            _visualize(config, dataset, images, labels)
        if config.get_timing:
            _time(config, dataset)


def _loader(config: LFWConfig, dataset: LFWDataset, batches: int) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    """``DataLoader`` as courses use it; it repeats the files if there are too few."""
    length = batches * config.batch_size
    sampler = ShuffledSampler(len(dataset), length=length)
    return stock_loader(
        dataset,
        config.num_workers,
        batch_bytes=config.batch_size * FLOAT_BYTES * math.prod(dataset.image_shape()),
        batch_size=config.batch_size,
        sampler=sampler,
        collate_fn=collate,
    )


def _visualize(config: LFWConfig, dataset: LFWDataset, images: torch.Tensor, labels: torch.Tensor) -> None:
    pixels, people = images[:SHOWN].mul(255).byte().numpy(), labels[:SHOWN].tolist()
    path = config.output / "batch.png"
    with results_in(config.output):
        plot_samples(path, pixels, people, people, dataset.classes, dataset.storage.root)  # as if all were recognized
    print(f"the batch is drawn in {path}")


def _time(config: LFWConfig, dataset: LFWDataset) -> None:
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        for _ in _loader(config, dataset, config.batches_to_check):
            pass
        seconds.append(time.perf_counter() - began)
    mean = statistics.mean(seconds)
    print(
        f"{config.batches_to_check} batches of {config.batch_size} with {config.num_workers} workers: "
        f"{mean:.2f} ± {statistics.stdev(seconds):.2f} s over {PASSES} passes, including the start of the workers; "
        f"{config.batches_to_check * config.batch_size / mean:,.0f} images/s "
        "(python -m dataloading.bench finds the best setting)"
    )


if __name__ == "__main__":
    main()
