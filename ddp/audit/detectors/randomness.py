"""Noise must differ between ranks and between loader workers."""

from __future__ import annotations

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Trace, together
from ddp.audit.watch.event_types import Draw, Forward, LoaderBegins, Loss, Seed, Worker

SELDOM = 3  # a line that draws in fewer than one of so many optimizer steps is left out


def detect(trace: Trace) -> Findings:
    yield from _draws(trace)
    yield from _of_main_process(trace)
    yield from _forward_passes(trace)
    yield from _workers(trace)


def _draws(trace: Trace) -> Findings:
    """Numbers that the script draws for the samples of a step: as many as a rank has samples, and equal on all ranks."""
    by_line: dict[
        str, list[tuple[Draw, bool]]
    ] = {}  # rank 0's draws, each with whether all ranks draw the same for their samples
    for steps in trace.steps():
        samples = {loss.samples for step in steps for loss in step.all(Loss)}
        for draws in together(steps, Draw):
            rows = draws[0].shape[0]
            if rows > 1 and rows % max(samples, default=1) == 0:
                is_same = rows in samples and len({draw.checksum for draw in draws}) == 1
                by_line.setdefault(draws[0].where, []).append((draws[0], is_same))
    for of_line in by_line.values():
        first, count = of_line[0][0], len({draw.step for draw, _ in of_line})
        what = f"torch.{first.function} of shape {first.shape}"
        if count < 2 or SELDOM * count <= of_line[-1][0].step - first.step:
            continue  # what is drawn once, or now and then as data and previews are, may be meant for all ranks
        if len({draw.checksum for draw, _ in of_line}) == 1:
            yield Finding("same-draws-each-step", first, f"each step draws the same numbers here: {what}")
        elif all(is_same for _, is_same in of_line):
            yield Finding("same-noise", first, f"all ranks draw the same numbers here: {what} in each of {count} steps")


def _of_main_process(trace: Trace) -> Findings:
    """NumPy's and Python's generators: in the same state on all ranks in each step, and drawn from between most."""
    steps = list(trace.steps())
    for number in range(2):
        states = [tuple(step.before.generators[number] for step in of_ranks) for of_ranks in steps]
        is_same = len(steps) > 2 and all(len(set(of_ranks)) == 1 for of_ranks in states)
        if is_same and 2 * len(set(states)) > len(states):
            seeds = trace.ranks[0].all(Seed)
            yield Finding("same-augmentation", seeds[-1] if seeds else steps[0][0].before)


def _forward_passes(trace: Trace) -> Findings:
    """Numbers that dropout and the like draw in forward passes: from another state on each rank, and in each step."""
    passes = [one for steps in trace.steps() for one in together(steps, Forward) if one[0].drawn_from is not None]
    if len(passes) > 1 and all(len({e.drawn_from for e in one}) == 1 for one in passes):
        yield Finding(
            "same-dropout",
            passes[0][0],
            f"all ranks draw the same random numbers in all of {len(passes)} forward passes, so dropout drops the same units",
        )
    drawn: dict[int | None, Forward] = {}
    for event, *_ in passes:
        before = drawn.setdefault(event.drawn_from, event)
        if before.step != event.step:
            yield Finding(
                "dropout-repeats", event, f"this forward pass draws the random numbers of step {before.step} again"
            )
            return


def _workers(trace: Trace) -> Findings:
    """Generators that a data set holds are copied into each worker. Those of a worker itself have the seed that it is given."""
    iterated = [event for rank in trace.ranks for event in rank.all(LoaderBegins) if event.workers]
    for of_worker, why in (
        (False, "the data set holds a generator, which each worker gets a copy of"),
        (True, "they are seeded alike"),
    ):
        starts: dict[int, list[int]] = {}  # for each state from which a worker draws, the ranks
        for rank in trace.ranks:
            for worker in rank.workers:
                states = [event.worker if of_worker else event.generators for event in worker.all(Worker)]
                for before, after in zip(states[0], states[-1], strict=False):
                    if before != after:
                        starts.setdefault(before, []).append(rank.rank)
        same = max(starts.values(), key=len, default=[])
        if len(same) > 1:
            yield Finding(
                "same-crops",
                iterated[0],
                f"{len(same)} loader workers draw the same numbers: {why}",
                is_hint=of_worker and len(set(same)) == len(same),
            )
            return
