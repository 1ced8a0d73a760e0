"""A picture of a real run of a loader: what the main process and each worker do at every moment.

    python -m dataloading.timeline
    python -m dataloading.timeline --loader fast --decoder simplejpeg
    python -m dataloading.timeline --start-method spawn --slow-batch-ms 0

By default the stock ``DataLoader`` runs twice over the same batches, with ``in_order`` and without, and one file of the
third batch is late. The trace of each run is written beside the picture; it opens at https://ui.perfetto.dev.
"""

from __future__ import annotations

import copy
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.cli import command, option, parse
from common.data.loaders import loader_errors
from common.errors import UsageError
from common.files.run_directory import files_line
from common.reporting.benchmark import run_alone, write_results
from common.reporting.trace_events import write_trace
from dataloading.dataset.augmentation import AUGMENTATIONS, course_transform
from dataloading.dataset.decoders import DECODERS
from dataloading.dataset.lfw import LFWDataset
from dataloading.dataset.sampler import ShuffledSampler, as_batch_key
from dataloading.dataset.storage import Reader, Storage
from dataloading.loader.fast_loader import FastLoader
from dataloading.loader.stock_loader import iterate, stock_loader
from dataloading.synthetic import face_cache
from dataloading.timeline.figure import plot_timeline
from dataloading.timeline.tracing import (
    LoaderTrace,
    Numbered,
    TracedBatches,
    TracedCollate,
    TracedFetch,
    TracedStart,
    Tracer,
    trace_events,
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
        who = "threads share each batch" if config.workers else "the main process does all work"
        return [record(config, files, batches, "fast", f"the fast loader: {who}")]
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
        tracer = Tracer(Path(folder))
        dataset = copy.copy(files)
        dataset.span = tracer.span
        if late is not None:
            keys = batches[late].content
            name_of_late = files.files[keys[len(keys) // 2].sample]
            dataset.storage = LateFile(files.storage, name_of_late, late, config.slow_batch_ms / 1000, tracer)
        began = _consume(config, dataset, batches, tracer, in_order)
        spans = [
            span._replace(start=span.start - began, end=span.end - began)
            for span in tracer.collect()
            if span.start >= began  # the fast loader's data set has decoded an image before
        ]
    return LoaderTrace(name, title, spans, (os.getpid(), threading.get_native_id()), late)


def _consume(
    config: LoadingTimelineConfig, dataset: LFWDataset, batches: Sequence[Numbered], tracer: Tracer, in_order: bool
) -> float:
    """Take each batch and work on it.

    :returns: the time at which the loader's iterator was requested
    """
    if config.loader == "fast":
        began, source = _iterate_fast(config, dataset, batches, tracer)
        numbered: Iterator[tuple[int, Any]] = enumerate(source)
    else:
        began, source = _iterate_stock(config, dataset, batches, tracer, in_order)
        numbered = source
    asked = time.perf_counter()
    try:
        for number, batch in numbered:
            taken = time.perf_counter()
            tracer.record("wait", asked, taken, number)
            time.sleep(config.step_ms / 1000)
            del batch
            asked = time.perf_counter()
            tracer.record("consume", taken, asked, number)
    finally:
        # The workers must end before their folder is removed. After an error, the traceback would keep the iterator and
        # so the workers alive. DataLoader's iterator has no public close.
        close = getattr(source, "_shutdown_workers", None) or getattr(source, "close", None)
        if close is not None:
            close()
    return began


def _iterate_stock(
    config: LoadingTimelineConfig, dataset: LFWDataset, batches: Sequence[Numbered], tracer: Tracer, in_order: bool
) -> tuple[float, Any]:
    began = time.perf_counter()
    workers: dict[str, Any] = {}
    if config.workers:
        # The workers inherit this folder, and this process removes it. A terminated worker would leave its own behind.
        multiprocessing.util.get_temp_dir()
        workers = {
            "prefetch_factor": config.prefetch_factor,
            "multiprocessing_context": config.start_method,
            "in_order": in_order,
            "worker_init_fn": TracedStart(tracer, began),
        }
    traced = TracedFetch(dataset, tracer)
    loader = stock_loader(traced, config.workers, batch_sampler=batches, collate_fn=TracedCollate(tracer), **workers)
    iterator = iterate(loader)
    if config.workers:
        tracer.record("start workers", began, time.perf_counter())
    return began, iterator


def _iterate_fast(
    config: LoadingTimelineConfig, dataset: LFWDataset, batches: Sequence[Numbered], tracer: Tracer
) -> tuple[float, Any]:
    keys = [as_batch_key(batch.content, epoch=0) for batch in batches]
    loader = FastLoader(
        TracedBatches(dataset, tracer, keys),
        batch_sampler=keys,
        num_workers=config.workers,
        pool="threads",
        prefetch_batches=config.prefetch_factor * max(1, config.workers),
    )
    return time.perf_counter(), iter(loader)


class LateFile:
    """A storage that delays one file when it is opened for one batch."""

    def __init__(self, storage: Storage, name: str, batch: int, delay_s: float, tracer: Tracer) -> None:
        self.root, self._storage = storage.root, storage
        self._name, self._batch, self._delay_s, self._tracer = name, batch, delay_s, tracer

    def names(self) -> list[str]:
        return self._storage.names()

    def open(self, name: str) -> Reader:
        if name == self._name and self._tracer.current_batch == self._batch:
            with self._tracer.span("late"):
                time.sleep(self._delay_s)
        return self._storage.open(name)


def report(config: LoadingTimelineConfig, runs: Sequence[LoaderTrace]) -> str:
    """Write the picture, the traces and the summary.

    :returns: the summary for the terminal
    """
    names = ["timeline.png", "summary.json", *(f"trace-{run.name}.json" for run in runs)]
    plot_timeline(config.output / "timeline.png", runs, _title(config), _idle_reason(config))
    for run in runs:
        write_trace(config.output / f"trace-{run.name}.json", trace_events(run))
    write_results(
        config.output / "summary.json", {"config": asdict(config), "runs": {run.name: _summary(run) for run in runs}}
    )
    lines = [_title(config)]
    for run in runs:
        lines += [f"{run.title}:", *(f"    {line}" for line in _lines(run))]
    return "\n".join([*lines, files_line(config.output, names, traces=True)])


def _summary(run: LoaderTrace) -> dict[str, Any]:
    first, held_up = run.batches[0], run.held_up()
    return {
        "order": [batch.number for batch in run.batches],
        "total_ms": 1000 * run.end,
        "first_batch_ms": 1000 * first.taken,
        "first_batch_asked_ms": 1000 * first.began,
        "first_batch_work_ms": 1000 * (first.finished - first.began),
        "first_batch_hand_over_ms": 1000 * (first.taken - first.finished),
        "waited_share": run.waited / run.end,
        "held_up_ms": {number: 1000 * seconds for number, seconds in held_up.items()},
        "batches": [batch._asdict() for batch in run.batches],
    }


def _lines(run: LoaderTrace) -> list[str]:
    facts = _summary(run)
    held_up = facts["held_up_ms"]
    longest = max(held_up, key=lambda number: held_up[number])
    return [
        f"first batch after {facts['first_batch_ms']:.0f} ms: {facts['first_batch_asked_ms']:.0f} until a worker began with "
        f"it, {facts['first_batch_work_ms']:.0f} of work, {facts['first_batch_hand_over_ms']:.0f} of hand-over",
        f"the main process waited {100 * facts['waited_share']:.0f} % of {facts['total_ms']:.0f} ms",
        f"a finished batch stood behind another for at most {held_up[longest]:.0f} ms (batch {longest})",
        f"taken in the order {' '.join(map(str, facts['order']))}",
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
