"""The report of one loader: does it matter, where the time goes, which lines, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from common.foreign_script.failure import short
from dataloading.doctor.causes import Cause
from dataloading.doctor.measured import LOADING, PRIVATE, Loader, mean, seconds_of
from dataloading.doctor.source import text_of

MOST_LINES, LEAST_SHARE = 6, 0.03
SLOWEST = 5


def report(loader: Loader, causes: list[Cause], trains: bool = True) -> Iterator[str]:
    """Its lines.

    :param trains: whether the batches are used between two questions
    """
    facts, batches = loader.facts, len(loader.all("batch"))
    settings = [f"batch_size={facts['batch_size']}", f"num_workers={facts['workers']}"]
    if facts["workers"]:
        settings += [
            f"persistent_workers={facts['persistent']}",
            f"prefetch_factor={facts['prefetch']}",
            facts["method"],
        ]
    yield f"{short(loader.line) or 'a loader'}: DataLoader({facts['dataset']}, {', '.join(settings)})"
    yield (
        f"  seen: {batches} batches in {loader.loop_s:.1f} s; iterations: {len(loader.all('iterator'))}, "
        f"of {facts['batches'] or 'an unknown number of'} batches"
    )
    if not batches:
        yield "  it gave no batch"
        return
    yield from _matters(loader, trains)
    yield from _stages(loader)
    yield from _lines(loader)
    for cause in causes:
        yield f"{short(cause.line)}: {cause.name}: {cause.text}"


def _matters(loader: Loader, trains: bool) -> Iterator[str]:
    batches, costs = len(loader.all("batch")), list(loader.per_batch().values())
    rate, use_s = batches / loader.loop_s, loader.loop_s - loader.wait_s
    if not trains:
        yield f"  {rate:.1f} batches/s"
        return
    training, loading = batches / max(use_s, 1e-6), max(1, loader.facts["workers"]) / (sum(costs[:3]) or 1e-6)
    yield (
        f"  does it matter: {'yes' if loader.matters else 'no'}: {loader.share:.0%} of the loop waits for batches, {rate:.1f}/s; alone, "
        f"training at {training:.1f}/s, loading at most at {loading:.1f}/s"
        f"{'' if loader.matters else ': little time is lost; on a faster device, it may be more'}"
    )


def _stages(loader: Loader) -> Iterator[str]:
    stages = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in loader.per_batch().items() if seconds >= 5e-6)
    yield f"  where the time goes, for a batch of {loader.bytes_per_batch() / 1e6:.2f} MB: {stages}"
    starts = loader.starts()
    if loader.facts["workers"] and starts:
        pickled = max(event["pickled_bytes"] for event in loader.all("iterator"))
        text = f"; {pickled / 1e6:.1f} MB were pickled" if pickled else ""
        yield f"  from a start of workers to the first batch: {mean(starts):.2f} s (starts: {len(starts)}){text}"
    for slot in range(loader.facts["workers"]):
        own = [worker for worker in loader.workers if worker.slot == slot and worker.all("fetch")]
        if own:
            fetches = [event for worker in own for event in worker.all("fetch")]
            grown = max(worker.growth(PRIVATE) for worker in own)
            text = f", its memory grew by {grown / 1e6:.0f} MB" if grown > 10e6 else ""
            cost = mean(map(seconds_of, fetches))
            yield f"    worker {slot}: {len(fetches)} batches, {_ms(cost)} each, busy for {mean(worker.busy for worker in own):.0%}{text}"


def _lines(loader: Loader) -> Iterator[str]:
    of = "the workers" if loader.facts["workers"] else "the main process"
    hottest = [(place, share) for place, share in loader.hottest(*LOADING) if share >= LEAST_SHARE][:MOST_LINES]
    if hottest:
        yield f"  lines in which {of} loaded:"
    for place, share in hottest:
        yield f"    {share:4.0%} {short(place.line) or '(no line of the script)'} {place.function or text_of(place.line)}"
    slowest = sorted(
        (one for event in loader.of_workers("fetch") for one in event["slowest"]), key=lambda one: -one[1]
    )[:SLOWEST]
    if slowest:
        yield f"  slowest samples: {', '.join(f'{index} ({_ms(seconds)})' for index, seconds in slowest)}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
