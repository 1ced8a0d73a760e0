"""Noise must differ between ranks and between loader workers."""

from __future__ import annotations

from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, Trace

CHAPTER = "ddp/README.md, chapter 3"


def detect(trace: Trace) -> Iterator[Finding]:
    yield from _draws(trace)
    yield from _forward_passes(trace)
    yield from _workers(trace)


def _draws(trace: Trace) -> Iterator[Finding]:
    """Numbers that the script draws for the samples of a step: as many as a rank has samples, and equal on all ranks."""
    equal: dict[str, dict[int, bool]] = {}
    drawn: dict[str, set[int]] = {}
    shown: dict[str, Event] = {}
    for steps in trace.steps():
        samples = {loss["samples"] for step in steps for loss in step.all("loss")}
        draws = [step.all("draw") for step in steps]
        if len(set(map(len, draws))) > 1 or len(steps) < 2:
            continue
        for of_ranks in zip(*draws, strict=True):
            one = of_ranks[0]
            if one["shape"][0] % max(samples, default=1) == 0 and one["shape"][0] > 1:
                is_same = all(other["checksum"] == one["checksum"] for other in of_ranks)
                equal.setdefault(one["where"], {})[one["step"]] = is_same and one["shape"][0] in samples
                shown.setdefault(one["where"], one)
                drawn.setdefault(one["where"], set()).add(one["checksum"])
    for line, same in equal.items():
        if len(drawn[line]) == 1 < len(same):
            yield Finding(
                f"each step draws the same numbers here: torch.{shown[line]['function']} of shape {shown[line]['shape']}",
                "Do not seed with the same number in each step",
                shown[line],
                CHAPTER,
            )
            continue
        if len(same) > 1 and all(same.values()):  # what is drawn once may be meant for all ranks
            yield Finding(
                f"all ranks draw the same numbers here: torch.{shown[line]['function']} of shape {shown[line]['shape']} in "
                f"each of {len(same)} steps",
                "Seed with seed + rank once the model is built, or use a generator of the rank",
                shown[line],
                CHAPTER,
            )


def _forward_passes(trace: Trace) -> Iterator[Finding]:
    """Numbers that dropout and the like draw in forward passes: from another state on each rank, and in each step."""
    steps = [[step.all("forward") for step in of_ranks] for of_ranks in trace.steps()]
    passes = [one for of_ranks in steps for one in zip(*of_ranks, strict=False) if one[0]["drawn_from"] is not None]
    if len(passes) > 1 and trace.world_size > 1 and all(len({e["drawn_from"] for e in one}) == 1 for one in passes):
        yield Finding(
            f"all ranks draw the same random numbers in all of {len(passes)} forward passes, so dropout drops the same units",
            "Seed with seed + rank once the model is built",
            passes[0][0],
            CHAPTER,
            is_hint=True,
        )
    drawn: dict[int, Event] = {}
    for event, *_ in passes:
        before = drawn.setdefault(event["drawn_from"], event)
        if before["step"] != event["step"]:
            yield Finding(
                f"this forward pass draws the random numbers of step {before['step']} again",
                "Do not seed with the same number again: seed once, or with the number of the step",
                event,
                CHAPTER,
            )
            return


def _workers(trace: Trace) -> Iterator[Finding]:
    """Generators that a data set holds are copied into each worker. Those of a worker itself have the seed that it is given."""
    groups = [(rank.rank, worker) for rank in trace.ranks for worker in rank.workers]
    iterated = [event for rank in trace.ranks for event in rank.all("epoch") if event["workers"]]
    for held, why in (
        ("generators", "the data set holds a generator, which each worker gets a copy of"),
        ("worker", "they are seeded alike"),
    ):
        starts: dict[int, list[int]] = {}
        for rank, worker in groups:
            begin = next(event for event in worker if event["kind"] == "worker")
            end = next((event for event in reversed(worker) if event["kind"] == "worker_end"), begin)
            for before, after in zip(begin[held], end[held], strict=False):
                if before != after:
                    starts.setdefault(before, []).append(rank)
        same = max(starts.values(), key=len, default=[])
        if len(same) > 1:
            yield Finding(
                f"{len(same)} loader workers draw the same numbers: {why}",
                "Make the generator in __getitem__ from (seed, epoch, index), or let worker_init_fn use torch.initial_seed()",
                iterated[0],
                "dataloading/README.md, chapter 7",
                is_hint=held == "worker" and len(set(same)) == len(same),  # those of other ranks: on other samples
            )
            return
