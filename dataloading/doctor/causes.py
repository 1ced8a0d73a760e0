"""From measurements of a loader to named causes, each with the line to blame."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from dataloading.doctor.measured import LOADING, MATTERS, PRIVATE, RESIDENT, Loader, Process, mean, seconds_of
from dataloading.doctor.source import first_line, line_of_attribute

DOMINATES = 0.4  # share of a batch's time
MEGABYTE = 1e6
SLOW_SAMPLE, LEAST_SLOW_S = 10.0, 0.02  # times the typical sample, seconds
SLOW_SHARE = 0.25  # of all samples' time
FAST_SAMPLE_S = 100e-6  # a sample that is only looked up in memory
GROWS, GOES_ON, COPIES = 50e6, 10e6, 20e6  # bytes
LOOKS = 4  # at a worker's memory, to tell whether it goes on to grow
BUSY = 0.7  # of a worker's time
FLOATS = r"ToTensor\(|to_tensor\(|convert_image_dtype\(|ToDtype\(|\.float\(\)|/ ?255|\.div_?\(255"
SETS_THREADS = r"set_num_threads\(|setNumThreads\("
KEEPS = r"self\.\w+\[[^]]+\] *=[^=]|self\.\w+\.(append|add|update|setdefault|extend)\(|lru_cache|@(functools\.)?cache\b"


@dataclass(frozen=True)
class Cause:
    """Something that makes a loader slow, or wrong.

    :param name: short and stable
    :param line: ``file:line`` to blame
    :param text: the numbers that prove it, and what to do
    """

    name: str
    line: str
    text: str


def find(loader: Loader, cores: int) -> list[Cause]:
    """The causes that are seen.

    :param cores: that the script may use
    """
    slow = list(_starts(loader)) if loader.matters else []
    if loader.matters and loader.steady_share >= MATTERS:
        slow += _slow(loader, cores)
        slow = [*_collections(loader), *(slow or _hottest(loader))]
    return [*_always(loader), *slow]


def _always(loader: Loader) -> Iterator[Cause]:
    """Those that are wrong, or end badly in a longer run, even if nobody waits for the loader."""
    facts, count = loader.facts, loader.facts["workers"]
    workers = [worker for worker in loader.workers if count and worker.profile]
    for file, owner, name, kind in facts["handles"]:
        if count and facts["method"] == "fork":
            yield Cause(
                "shared-handle",
                line_of_attribute(file, owner, name) or loader.line,
                f"{owner or 'the module'}.{name} ({kind}) was opened before {count} workers were forked, and they share its position "
                "and locks: open it in __getitem__, when a worker needs it first",
            )
    copied = max(workers, key=lambda worker: worker.growth(PRIVATE), default=None)
    if copied and copied.growth(PRIVATE) >= COPIES and copied.growth(RESIDENT) < copied.growth(PRIVATE) / 2:
        for file, owner, name, kind in facts["lists"][:1]:
            yield Cause(
                "python-list-copied",
                line_of_attribute(file, owner, name) or loader.line,
                f"each worker has copied {copied.growth(PRIVATE) / MEGABYTE:.0f} MB of its parent's memory, since reading an object counts a "
                f"reference: keep {name}, a {kind}, in numpy arrays or tensors",
            )
    growing = max(workers, key=lambda worker: worker.growth(RESIDENT), default=None)
    # A worker may have so many batches in memory at once.
    if growing and _grows(growing, GROWS + (facts["prefetch"] + 1) * loader.bytes_per_batch()):
        yield Cause(
            "growing-workers",
            first_line(KEEPS, _files(loader)) or loader.hottest_line(*LOADING)[0] or loader.line,
            f"a worker has grown by {growing.growth(RESIDENT) / MEGABYTE:.0f} MB, and goes on: keep nothing of a sample in the data set",
        )


def _grows(worker: Process, least: float) -> bool:
    """Whether a worker's own memory grows all the time: in the last third of its looks it has more than ever in the first half.

    :param least: bytes; less may be batches
    """
    resident = [look[RESIDENT] for look in worker.profile["memory"]]
    if len(resident) < LOOKS:
        return False
    later = min(resident[-len(resident) // 3 :]) - max(resident[: len(resident) // 2])
    return min(worker.growth(RESIDENT), worker.growth(PRIVATE)) >= least and later >= GOES_ON


def _files(loader: Loader) -> list[str]:
    """The script's files, those of the data set first."""
    places = [loader.facts["getitem"], *(place.line for place, _ in loader.hottest(*LOADING)), loader.line]
    return list(dict.fromkeys(place.rpartition(":")[0] for place in places))


def _slow(loader: Loader, cores: int) -> Iterator[Cause]:
    facts, costs, fetches = loader.facts, loader.per_batch(), loader.of_workers("fetch")
    seconds = sum(costs[stage] for stage in ("__getitem__", "collate", "IPC out")) or 1.0
    samples, fetched_s = sum(event["samples"] for event in fetches) or 1, sum(map(seconds_of, fetches))
    hot = loader.hottest_line(*LOADING)[0] or loader.line
    slow = _slow_samples(loader)
    if slow:
        waiting = facts["workers"] > 1 and facts["in_order"]
        yield Cause(
            "slow-samples",
            hot,
            f"{len(slow)} of {samples} samples take {sum(slow.values()) / fetched_s:.0%} of the time (as {', '.join(list(slow)[:3])})"
            + (", and finished batches wait behind them: in_order=False, or" if waiting else ":")
            + " make them faster",
        )
    threads = max((worker.profile.get("busy_threads", 0) for worker in loader.workers), default=0)
    if facts["workers"] and threads and facts["workers"] * (threads + 1) > cores:
        yield Cause(
            "too-many-threads",
            first_line(SETS_THREADS, _files(loader)) or loader.line,
            f"each of {facts['workers']} workers computes in {threads + 1} threads, on {cores} cores: in worker_init_fn, "
            "torch.set_num_threads(1) and cv2.setNumThreads(0)",
        )
    per_sample = fetched_s / samples
    if facts["tensors"] and per_sample < FAST_SAMPLE_S and any(event["slowest"] for event in fetches):
        _, owner, name, _ = facts["tensors"][0]
        yield Cause(
            "tensor-by-sample",
            hot,
            f"{owner or 'the module'}.{name} lies in memory, and {samples:,} samples are fetched and collated one by one, "
            f"{1e6 * per_sample:.0f} µs each: index it with a whole batch (__getitems__, or a BatchSampler as sampler)",
        )
        return
    converts = sum(s for place, s in loader.hottest(*LOADING) if "to_tensor" in place.function)
    travels = (costs["collate"] + costs["IPC out"] + costs["IPC in"]) / seconds
    size, floats = loader.bytes_per_batch(), loader.bytes_per_batch("floats_of_bytes")
    if floats > size / 2 and size > MEGABYTE and converts + travels >= SLOW_SHARE:
        yield Cause(
            "floats-for-bytes",
            first_line(FLOATS, _files(loader)) or loader.line,
            f"a batch has {size / MEGABYTE:.1f} MB of floats that were bytes; to convert, collate and send them takes "
            f"{converts + travels:.0%} of its time: send uint8 (PILToTensor), and convert on the device",
        )
    elif costs["collate"] >= DOMINATES * seconds:
        yield Cause(
            "slow-collate",
            loader.hottest_line("collate")[0] or loader.line,
            f"{facts['collate']} takes {costs['collate'] / seconds:.0%} of a batch's time, {1e3 * costs['collate']:.1f} ms",
        )
    busy = mean(worker.busy for worker in loader.workers)
    if not slow and facts["workers"] < cores and (busy >= BUSY or not facts["workers"]):
        now = (
            f"{facts['workers']} workers, busy for {busy:.0%}"
            if facts["workers"]
            else "no workers, so nothing loads while it trains"
        )
        yield Cause(
            "too-few-workers",
            loader.line,
            f"{now}, on {cores} cores: more workers, at most {cores} for all ranks together",
        )


def _collections(loader: Loader) -> Iterator[Cause]:
    """Garbage collections, which look at all objects that a process inherits, torch's among them."""
    fetches = loader.of_workers("fetch")
    share = sum(event["collected"] for event in fetches) / (sum(map(seconds_of, fetches)) or 1.0)
    if share >= SLOW_SHARE:
        yield Cause(
            "garbage-collection",
            loader.line,
            f"Python's garbage collector takes {share:.0%} of the time, since the samples make many "
            "objects: gc.freeze() in worker_init_fn, or before the loop without workers",
        )


def _starts(loader: Loader) -> Iterator[Cause]:
    """Workers that are started again and again, and data sets that are pickled to each."""
    facts, starts = loader.facts, loader.starts()
    lost = sum(starts) - len(starts) * mean(map(seconds_of, loader.of_workers("fetch")))
    if not facts["workers"] or lost < MATTERS * loader.loop_s:
        return
    pickled = max(event["pickled_bytes"] for event in loader.all("iterator")) / facts["workers"]
    if pickled > MEGABYTE:
        yield Cause(
            "dataset-pickled",
            loader.line,
            f"each worker gets {pickled / MEGABYTE:.0f} MB pickled ({facts['method']}), and the first batch comes after "
            f"{mean(starts):.1f} s: keep in the data set only where its samples lie, and in arrays",
        )
    if len(starts) > 1:
        yield Cause(
            "workers-restarted",
            loader.line,
            f"workers were started {len(starts)} times, {mean(starts):.2f} s each to the first batch, {lost / loader.loop_s:.0%} of the "
            "loop: persistent_workers=True",
        )


def _slow_samples(loader: Loader) -> dict[str, float]:
    """Few samples that take a large part of the time, the slowest first. A worker's first batch may have to import and open files."""
    later = [event for worker in loader.workers for event in worker.all("fetch")[1:]]
    if not later:
        return {}
    typical = statistics.median((seconds_of(event) - event["collate"]) / max(1, event["samples"]) for event in later)
    every = [one for event in later for one in event["slowest"]]
    slow = {index: s for index, s in every if s > max(LEAST_SLOW_S, SLOW_SAMPLE * typical)}
    enough = len(slow) > 2 and sum(slow.values()) >= SLOW_SHARE * sum(map(seconds_of, later))
    return dict(sorted(slow.items(), key=lambda one: -one[1])) if enough else {}


def _hottest(loader: Loader) -> Iterator[Cause]:
    line, share = loader.hottest_line("getitem")
    costs = loader.per_batch()
    if costs["__getitem__"] >= DOMINATES * sum(costs[stage] for stage in ("__getitem__", "collate", "IPC out")) > 0:
        yield Cause(
            "slow-getitem",
            line or loader.facts["getitem"] or loader.line,
            f"__getitem__ takes {1e3 * costs['__getitem__']:.0f} ms of each batch"
            + (f", {share:.0%} of it in this line" if line else ""),
        )
