"""From the pipeline that courses teach to the fast loader, one change at a time.

    python -m dataloading.ladder
    python -m dataloading.ladder --augmentation affine

Every rung is measured in the same rounds, and so is the ceiling: the fastest installed decoder alone, on all usable cores. All
read the same files, a random sample of the folder. Where the extra ``libraries`` is installed, SPDL is one of them: Meta's loader
with threads, arXiv 2504.20067.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from common.benchmarking.figures import plot_rounds
from common.benchmarking.timing import Spread, interleave, paired_ratio, share_of_limit
from common.benchmarking.turns import CPU, Rounds, run_benchmark, write_report
from common.command_line.cli import command, option
from common.data.datasets import BatchKey, keep_batch
from common.data.loaders import loader_errors
from common.machine import usable_cores
from dataloading.bench.settings import Listed
from dataloading.bench.sweep import LoaderRun
from dataloading.dataset.augmentation import AUGMENTATIONS, course_transform
from dataloading.dataset.batches import ImageBatches
from dataloading.dataset.decoders import decode_pillow, get_decoder, installed
from dataloading.dataset.image_files import ImageFiles
from dataloading.dataset.sampler import ShuffledBatches, ShuffledSampler
from dataloading.dataset.storage import LocalFolder, Storage
from dataloading.loader.fast_loader import FastLoader
from dataloading.loader.stock_loader import stock_loader
from dataloading.synthetic import face_cache

MOST_FILES = 2048  # of the sample
COURSE = "the course's pipeline"
Make = Callable[[int], Iterable[Any]]


@dataclass(frozen=True)
class LoadingLadderConfig:
    """Settings of ``dataloading.ladder``."""

    path_to_folder: str | None = option(None, "folder of the JPEG files (default: drawn faces)")
    augmentation: str = option("none", "augmentation of each image", choices=AUGMENTATIONS)
    workers: int | None = option(None, "workers of every variant but the first (default: the usable cores)", minimum=1)
    batch_size: int = option(64, "images per batch", minimum=1)
    batches: int = option(40, "batches of each run", minimum=1)
    repeats: int = option(7, "rounds that count", minimum=2)
    output: Path = option(Path("runs/ladder"), "folder of the JSON and the PNG")


class Ceiling(Dataset[Any]):
    """JPEG files in memory, which are decoded and forgotten; for ``collate_fn=keep_batch``.

    There are no files, no batches and no consumer: pixels are decoded into one buffer, and a worker sends back nothing but the
    indices.

    :param images: contents of the files
    :param decoder: one of :data:`common.data.DECODERS`
    """

    def __init__(self, images: Sequence[bytes], decoder: str) -> None:
        self._images, self._decode = images, get_decoder(decoder)
        self._out = np.empty_like(decode_pillow(images[0]))

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, key: BatchKey) -> tuple[npt.NDArray[np.int64]]:
        for sample in key.samples.tolist():
            self._decode(self._images[sample], self._out)
        return (key.samples,)


class Spdl:
    """SPDL's pipeline, as its documentation has it: threads that each fetch a whole batch, and a queue of batches.

    Its own decoder needs FFmpeg's libraries; here it has the one of the other rungs.
    """

    def __init__(self, dataset: ImageBatches, keys: Iterable[BatchKey], workers: int) -> None:
        self._fetch, self._keys, self._workers = dataset.__getitems__, keys, workers

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder

        logging.getLogger("spdl").setLevel(logging.WARNING)  # it tells much about every run
        builder = PipelineBuilder().add_source(self._keys).pipe(self._fetch, concurrency=self._workers)
        pipeline = builder.add_sink(2 * self._workers).build(num_threads=self._workers)
        with pipeline.auto_stop():
            yield from pipeline


@command
def main() -> None:
    run_benchmark(LoadingLadderConfig, "dataloading.ladder", __doc__, None, run, report)


def run(config: LoadingLadderConfig) -> dict[str, list[float]]:
    """Let all variants and the ceiling take turns; returns the images/s of each, one entry per round."""
    with loader_errors(), Rounds(config.repeats + 1) as progress:
        storage = Listed(LocalFolder(config.path_to_folder or os.fspath(face_cache.ensure())), MOST_FILES)
        files = ImageFiles(storage)
        for sample in range(len(files)):
            files.image(sample)  # a damaged file is named before anything is timed
        ceiling = Ceiling([files.read(sample) for sample in range(len(files))], installed()[0])
        workers = config.workers or usable_cores()
        rungs = _rungs(config, storage, workers, ceiling)
        runs = {name: LoaderRun(make, count, 2 * count, config.batches, CPU) for name, (count, make) in rungs.items()}
        seconds = interleave(
            runs,
            config.repeats,
            after_round=lambda: progress.round_done(f"{len(runs)} rungs"),
        )
        images = config.batches * config.batch_size
        return {name: [images / s for s in own] for name, own in seconds.items()}


def _rungs(
    config: LoadingLadderConfig, storage: Storage, workers: int, ceiling: Ceiling
) -> dict[str, tuple[int, Make]]:
    """For each rung, its name, number of workers and loader factory. The first rung is tried with several numbers, and the
    ceiling is the last."""
    from torchvision.transforms import PILToTensor

    def files(decoder: str, **settings: Any) -> ImageFiles:
        return ImageFiles(storage, decoder=decoder, **settings)

    def sampler(dataset: Sized, batches: int) -> ShuffledSampler:
        return ShuffledSampler(len(dataset), length=batches * config.batch_size)

    def per_image(dataset: ImageFiles, workers: int) -> Make:
        size = config.batch_size
        return lambda batches: stock_loader(dataset, workers, batch_size=size, sampler=sampler(dataset, batches))

    def whole(dataset: ImageBatches | Ceiling, workers: int = workers) -> Make:
        return lambda batches: stock_loader(
            dataset,
            workers,
            batch_sampler=ShuffledBatches(sampler(dataset, batches), config.batch_size),
            collate_fn=keep_batch,
        )

    def fast(dataset: ImageFiles) -> Make:
        return lambda batches: FastLoader(
            ImageBatches(dataset),
            batch_sampler=ShuffledBatches(sampler(dataset, batches), config.batch_size),
            num_workers=workers,
            prefetch_batches=2 * workers,
        )

    def spdl(dataset: ImageBatches) -> Make:
        return lambda batches: Spdl(dataset, ShuffledBatches(sampler(dataset, batches), config.batch_size), workers)

    decoder = installed()[0]
    augmented = {"augmentation": config.augmentation}
    course = files("pillow", transform=course_transform(config.augmentation))
    counts = sorted({1, workers, workers + 1, 2 * workers})
    rungs = {f"{COURSE}, {count} workers": (count, per_image(course, count)) for count in counts}
    rungs["uint8 instead of float"] = workers, per_image(files("pillow", transform=PILToTensor(), **augmented), workers)
    rungs["into the batch's memory, no collate"] = workers, whole(ImageBatches(files("pillow", **augmented)))
    if decoder != "pillow":
        rungs[f"{decoder} instead of Pillow"] = workers, whole(ImageBatches(files(decoder, **augmented)))
    if config.augmentation == "none" and util.find_spec("spdl"):
        rungs[f"SPDL, {decoder}"] = workers, spdl(ImageBatches(files(decoder)))
    rungs["fast loader: memory reused, threads"] = workers, fast(files(decoder, **augmented))
    rungs["ceiling"] = usable_cores(), whole(ceiling, usable_cores())
    return rungs


def report(config: LoadingLadderConfig, rates: dict[str, list[float]]) -> str:
    """Write the JSON and the PNG.

    :returns: the table for the terminal
    """
    decoder = installed()[0]
    folder = config.path_to_folder or face_cache.TITLE
    courses = [name for name in rates if name.startswith(COURSE)]
    best_course = max(courses, key=lambda name: statistics.median(rates[name]))
    shown = [best_course, *[name for name in rates if name not in courses and name != "ceiling"]]
    ceiling = rates["ceiling"]
    lines = [f"{'':>52}  images/s [quartiles]            of the course's at its best   of the ceiling"]
    lines += [
        f"{name:>52}  {Spread.of(rates[name]):>8,.0f}   {paired_ratio(rates[name], rates[best_course]):.2f}   "
        f"{share_of_limit(paired_ratio(rates[name], ceiling).median)}"
        for name in [*shown, "ceiling"]
    ]
    name = f"ladder-{config.augmentation}"
    plot_rounds(
        config.output / f"{name}.png",
        {"": {rung: rates[rung] for rung in shown} | {f"ceiling: {decoder} alone on {usable_cores()} cores": ceiling}},
        title=f"{folder}, batches of {config.batch_size}, augmentation {config.augmentation}",
        x_title="images/s",
        spec=",.0f",
    )
    content = {"folder": folder, "decoder": decoder, "images_per_s": rates}
    return write_report(config, name, content, [name], lines)


if __name__ == "__main__":
    main()
