"""A picture of a real run of a loader: what the main process and each worker do at every moment.

    python -m dataloading.timeline
    python -m dataloading.timeline --loader fast --decoder simplejpeg
    python -m dataloading.timeline --start-method spawn --slow-batch-ms 0

By default torch's ``DataLoader`` runs twice over the same batches, with ``in_order`` and without, and one file of the
third batch is late. The trace of each run is written beside the picture; it opens at https://ui.perfetto.dev.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing.util
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.cli import command, option, parse
from common.data.loaders import loader_errors
from common.errors import UsageError
from common.files.run_directory import files_line
from common.reporting.benchmark import run_alone, write_results
from common.reporting.spans import Recorder, in_lane, shifted, write_trace
from dataloading.dataset.augmentation import AUGMENTATIONS, course_transform
from dataloading.dataset.decoders import DECODERS
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import ShuffledSampler, as_batch_key
from dataloading.loader.fast_loader import FastLoader
from dataloading.loader.stock_loader import iterate, stock_loader
from dataloading.synthetic import face_cache
from dataloading.timeline.figure import first_batch, plot_timeline
from dataloading.timeline.tracing import (
    MAIN,
    LateFile,
    LoaderTrace,
    Numbered,
    TracedBatches,
    TracedFetch,
    traced_collate,
    traced_start,
)

START_METHODS = tuple(multiprocessing.get_all_start_methods())


@dataclass(frozen=True)
class LoadingTimelineConfig:
    """Settings of ``dataloading.timeline``."""

    path_to_folder: str | None = option(None, "folder or URL of the JPEG files (default: drawn faces)")
    loader: str = option(
        "stock", "stock: DataLoader with processes; fast: FastLoader with threads", choices=("stock", "fast")
    )
    workers: int = option(2, "processes or threads; 0 loads in the main process", minimum=0)
    batches: int = option(16, "batches of a run", minimum=1)
    batch_size: int = option(32, "images per batch", minimum=1)
    prefetch_factor: int = option(2, "batches requested ahead, per worker", minimum=1)
    augmentation: str = option("none", "augmentation of each image", choices=AUGMENTATIONS)
    decoder: str = option("pillow", "decoder of the JPEGs", choices=DECODERS)
    start_method: str = option(START_METHODS[0], "start method of the processes", choices=START_METHODS)
    step_ms: float = option(15.0, "the main process's work on a batch, as a sleep", minimum=0)
    slow_batch: int = option(2, "number of the batch with one late file, counted from 0", minimum=0)
    slow_batch_ms: float = option(400.0, "delay of that file; 0 for none", minimum=0)
    output: Path = option(Path("runs/timeline"), "folder of the picture and the traces")

    def __post_init__(self) -> None:
        if self.slow_batch_ms and self.slow_batch >= self.batches:
            raise UsageError(
                f"--slow-batch {self.slow_batch} is not one of --batches {self.batches}, which are 0 to {self.batches - 1}; "
                "give another, or --slow-batch-ms 0"
            )


@command
def main() -> None:
    config = parse(LoadingTimelineConfig, "dataloading.timeline", __doc__)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM then also cleans up workers and temporary files
    run_alone("dataloading.timeline", config.output, lambda: measure(config), lambda runs: report(config, runs))


@loader_errors()
def measure(config: LoadingTimelineConfig) -> list[LoaderTrace]:
    """Make the runs of one picture."""
    files = LFWDataset(
        config.path_to_folder or face_cache.ensure(),
        transform=course_transform("none") if config.loader == "stock" else None,
        with_label=True,
        decoder=config.decoder,
        augmentation=config.augmentation,
    )
    keys = list(ShuffledSampler(len(files), length=config.batches * config.batch_size))
    for key in keys:  # otherwise only the first run would read from a cold page cache
        files.read(key.sample)
    starts = range(0, len(keys), config.batch_size)
    batches = [Numbered(i, keys[start : start + config.batch_size]) for i, start in enumerate(starts)]
    if config.loader == "fast":
        how = "threads share each batch" if config.workers else "the main process does all work"
        return [record(config, files, batches, "fast", f"the fast loader: {how}")]
    if config.workers == 0:
        return [record(config, files, batches, "no-workers", "num_workers=0: the main process does all work")]
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
    in_order: bool = True,
) -> LoaderTrace:
    """Load all batches once and trace every stage."""
    late = config.slow_batch if config.slow_batch_ms else None
    with tempfile.TemporaryDirectory(prefix="raw-ddp-timeline-") as folder:
        recorder = Recorder(folder=Path(folder))
        dataset = copy.copy(files)
        dataset.span = recorder.span
        if late is not None:
            keys = batches[late].content
            name_of_late = files.files[keys[len(keys) // 2].sample]
            dataset.storage = LateFile(files.storage, name_of_late, late, config.slow_batch_ms / 1000, recorder)
        began = time.perf_counter()
        loader = _traced_loader(config, dataset, batches, recorder, in_order, began)
        if config.loader == "fast":  # its data set has decoded an image
            began = time.perf_counter()
        source: Any = iterate(loader)
        asked = time.perf_counter()
        if config.loader == "stock" and config.workers:
            recorder.add("start workers", began, asked)
        try:
            for number, batch in enumerate(source) if config.loader == "fast" else source:
                taken = time.perf_counter()
                recorder.add("wait", asked, taken, batch=number)
                time.sleep(config.step_ms / 1000)
                del batch
                asked = time.perf_counter()
                recorder.add("consume", taken, asked, batch=number)
        finally:
            # The workers must end before their folder is removed. After an error, the traceback would keep the iterator and
            # so the workers alive. DataLoader's iterator has no public close.
            close = getattr(source, "_shutdown_workers", None) or getattr(source, "close", None)
            if close is not None:
                close()
        spans = [span for span in recorder.collect() if span.start >= began]
    own = threading.current_thread().name
    spans = [span._replace(lane=MAIN if span.lane == own else span.lane) for span in shifted(spans, began)]
    return LoaderTrace(name, title, spans, late)


def _traced_loader(
    config: LoadingTimelineConfig,
    dataset: LFWDataset,
    batches: Sequence[Numbered],
    recorder: Recorder,
    in_order: bool,
    began: float,
) -> Iterable[Any]:
    if config.loader == "fast":
        keys = [as_batch_key(batch.content, epoch=0) for batch in batches]
        return FastLoader(
            TracedBatches(dataset, recorder, keys),
            batch_sampler=keys,
            num_workers=config.workers,
            pool="threads",
            prefetch_batches=config.prefetch_factor * max(1, config.workers),
        )
    workers: dict[str, Any] = {}
    if config.workers:
        # The workers inherit this folder, and this process removes it. A terminated worker would leave its own behind.
        multiprocessing.util.get_temp_dir()
        workers = {
            "prefetch_factor": config.prefetch_factor,
            "multiprocessing_context": config.start_method,
            "in_order": in_order,
            "worker_init_fn": functools.partial(traced_start, recorder, began),
        }
    traced, collate = TracedFetch(dataset, recorder), functools.partial(traced_collate, recorder)
    return stock_loader(traced, config.workers, batch_sampler=batches, collate_fn=collate, **workers)


def report(config: LoadingTimelineConfig, runs: Sequence[LoaderTrace]) -> str:
    """Write the picture, the traces and the summary.

    :returns: the summary for the terminal
    """
    names = ["timeline.png", "summary.json", *(f"trace-{run.name}.json" for run in runs)]
    plot_timeline(config.output / "timeline.png", runs, _title(config), _idle_reason(config))
    for run in runs:
        spans = [span for lane in run.lanes for span in in_lane(run.spans, lane)]
        write_trace(config.output / f"trace-{run.name}.json", {run.title: spans + run.queue()})
    summaries = {run.name: _summary(run) for run in runs}
    write_results(config.output / "summary.json", {"config": asdict(config), "runs": summaries})
    lines = [_title(config)]
    for run in runs:
        lines += [f"{run.title}:", *(f"    {line}" for line in _lines(run))]
    return "\n".join([*lines, files_line(config.output, names, traces=True)])


def _summary(run: LoaderTrace) -> dict[str, Any]:
    return {
        "order": [batch.number for batch in run.batches],
        "total_ms": 1000 * run.end,
        "waited_share": run.waited / run.end,
        "batches": [batch._asdict() for batch in run.batches],
    }


def _lines(run: LoaderTrace) -> list[str]:
    return [
        first_batch(run),
        f"the main process waited {100 * run.waited / run.end:.0f} % of {1000 * run.end:.0f} ms",
        f"taken in the order {' '.join(str(batch.number) for batch in run.batches)}",
    ]


def _title(config: LoadingTimelineConfig) -> str:
    if config.workers == 0:
        workers = "no workers"
    else:
        workers = f"{config.workers} {'threads' if config.loader == 'fast' else f'workers ({config.start_method})'}"
    late = f", one file of batch {config.slow_batch} {config.slow_batch_ms:.0f} ms late" if config.slow_batch_ms else ""
    return (
        f"{config.loader} loader, {workers}, {config.batches} batches of {config.batch_size}, "
        f"{config.step_ms:g} ms of work on each{late}"
    )


def _idle_reason(config: LoadingTimelineConfig) -> str:
    """Why an idle worker gets no batch."""
    ahead = config.workers * config.prefetch_factor
    return (
        f"idle: {ahead} batches are requested ({config.workers} workers, {config.prefetch_factor} each), "
        "and the next only when the main process takes one"
    )


if __name__ == "__main__":
    main()
