"""A picture of a real run of torch's ``DataLoader``: what the main process and each worker do at every moment.

    python -m dataloading.timeline
    python -m dataloading.timeline --workers 3 --decoder simplejpeg
    python -m dataloading.timeline --start-method spawn

``DataLoader`` runs twice over the same batches, with ``in_order`` and without, and one file of the third batch is late. The
trace of each run is written beside the picture; it opens at https://ui.perfetto.dev.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing.util
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.cli import command, option
from common.data import DECODERS
from common.data.loaders import PREFETCH_FACTOR, loader_errors
from common.files.run_directory import files_line
from common.reporting.spans import Recorder, in_lane, shifted, write_trace
from common.reporting.turns import run_benchmark
from dataloading.dataset.augmentation import AUGMENTATIONS, course_transform
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import ShuffledSampler
from dataloading.loader.stock_loader import stock_loader
from dataloading.synthetic import face_cache
from dataloading.timeline.figure import first_batch, plot_timeline
from dataloading.timeline.tracing import MAIN, LoaderTrace, Numbered, TracedFetch, traced_collate, traced_start

SLOW_BATCH = 2  # number of the batch with one late file, counted from 0
START_METHODS = tuple(multiprocessing.get_all_start_methods())


@dataclass(frozen=True)
class LoadingTimelineConfig:
    """Settings of ``dataloading.timeline``."""

    path_to_folder: str | None = option(None, "folder or URL of the JPEG files (default: drawn faces)")
    workers: int = option(2, "worker processes", minimum=1)
    batches: int = option(16, "batches of a run", minimum=SLOW_BATCH + 1)
    batch_size: int = option(32, "images per batch", minimum=1)
    augmentation: str = option("none", "augmentation of each image", choices=AUGMENTATIONS)
    decoder: str = option("pillow", "decoder of the JPEGs", choices=DECODERS)
    start_method: str = option(START_METHODS[0], "start method of the processes", choices=START_METHODS)
    step_ms: float = option(15.0, "the main process's work on a batch, as a sleep", minimum=0)
    slow_batch_ms: float = option(400.0, "delay of one file of the third batch", minimum=1)
    output: Path = option(Path("runs/timeline"), "folder of the picture and the traces")


@command
def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM then also cleans up workers and temporary files
    run_benchmark(LoadingTimelineConfig, "dataloading.timeline", __doc__, None, measure, report)


@loader_errors()
def measure(config: LoadingTimelineConfig) -> list[LoaderTrace]:
    """Make the runs of one picture."""
    files = LFWDataset(
        config.path_to_folder or face_cache.ensure(),
        transform=course_transform("none"),
        decoder=config.decoder,
        augmentation=config.augmentation,
    )
    keys = list(ShuffledSampler(len(files), length=config.batches * config.batch_size))
    for key in keys:  # otherwise only the first run would read from a cold page cache
        files.read(key.sample)
    starts = range(0, len(keys), config.batch_size)
    batches = [Numbered(i, keys[start : start + config.batch_size]) for i, start in enumerate(starts)]
    return [
        record(config, files, batches, "in-order", "in_order=True (the default)", in_order=True),
        record(config, files, batches, "out-of-order", "in_order=False", in_order=False),
    ]


def record(
    config: LoadingTimelineConfig,
    files: LFWDataset,
    batches: Sequence[Numbered],
    name: str,
    title: str,
    *,
    in_order: bool,
) -> LoaderTrace:
    """Load all batches once and trace every stage."""
    # The workers inherit this folder, and this process removes it. A terminated worker would leave its own behind.
    multiprocessing.util.get_temp_dir()
    with tempfile.TemporaryDirectory(prefix="raw-ddp-timeline-") as folder:
        recorder = Recorder(folder=Path(folder))
        dataset = copy.copy(files)
        dataset.span = recorder.span
        began = time.perf_counter()
        loader = stock_loader(
            TracedFetch(dataset, recorder, SLOW_BATCH, config.slow_batch_ms / 1000),
            config.workers,
            batch_sampler=batches,
            collate_fn=functools.partial(traced_collate, recorder),
            multiprocessing_context=config.start_method,
            in_order=in_order,
            worker_init_fn=functools.partial(traced_start, recorder, began),
        )
        iterator: Any = iter(loader)
        asked = time.perf_counter()
        recorder.add("start workers", began, asked, MAIN)
        try:
            for number, batch in iterator:
                taken = time.perf_counter()
                recorder.add("wait", asked, taken, MAIN, batch=number)
                time.sleep(config.step_ms / 1000)
                del batch
                asked = time.perf_counter()
                recorder.add("consume", taken, asked, MAIN, batch=number)
        finally:
            # The workers must end before their folder is removed. After an error, the traceback would keep the iterator and
            # so the workers alive. DataLoader's iterator has no public close.
            iterator._shutdown_workers()
        return LoaderTrace(name, title, shifted(recorder.collect(), began), SLOW_BATCH)


def report(config: LoadingTimelineConfig, runs: Sequence[LoaderTrace]) -> str:
    """Write the picture, the traces and the summary.

    :returns: the summary for the terminal
    """
    names = ["timeline.png", *(f"trace-{run.name}.json" for run in runs)]
    plot_timeline(config.output / "timeline.png", runs, _title(config), _idle_reason(config))
    for run in runs:
        spans = [span for lane in run.lanes for span in in_lane(run.spans, lane)]
        write_trace(config.output / f"trace-{run.name}.json", {run.title: spans})
    lines = [_title(config)]
    for run in runs:
        lines += [f"{run.title}:", *(f"    {line}" for line in _lines(run))]
    return "\n".join([*lines, files_line(config.output, names, traces=True)])


def _lines(run: LoaderTrace) -> list[str]:
    return [
        first_batch(run),
        f"the main process waited {100 * run.waited / run.end:.0f} % of {1000 * run.end:.0f} ms",
        f"taken in the order {' '.join(str(batch.number) for batch in run.batches)}",
    ]


def _title(config: LoadingTimelineConfig) -> str:
    return (
        f"DataLoader, {config.workers} workers ({config.start_method}), {config.batches} batches of {config.batch_size}, "
        f"{config.step_ms:g} ms of work on each, one file of batch {SLOW_BATCH} {config.slow_batch_ms:.0f} ms late"
    )


def _idle_reason(config: LoadingTimelineConfig) -> str:
    """Why an idle worker gets no batch."""
    ahead = config.workers * PREFETCH_FACTOR
    return (
        f"idle: {ahead} batches are requested ({config.workers} workers, {PREFETCH_FACTOR} each), "
        "and the next only when the main process takes one"
    )


if __name__ == "__main__":
    main()
