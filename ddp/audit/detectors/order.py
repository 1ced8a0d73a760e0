"""Each epoch needs an order of its own, also after a resume."""

from __future__ import annotations

from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Event, RankTrace, Trace, epochs

CHAPTER = "ddp/README.md, chapter 3"


def detect(trace: Trace) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        yield from _leftover(rank)
        training = [epoch for epoch in epochs(rank) if epoch.trains]
        seen: dict[tuple[int, ...], int] = {}
        for number, epoch in enumerate(training):
            samples = epoch.samples
            if samples is None or samples == sorted(samples):
                continue
            if tuple(samples) not in seen:
                seen[tuple(samples)] = number
                continue
            before = training[seen[tuple(samples)]]
            resumed = any(event["kind"] == "load" for event in _between(rank.events, before.begin, epoch.begin))
            yield Finding(
                f"epoch {number} gives the {len(samples)} samples in the same order as epoch {seen[tuple(samples)]}"
                + (", after a checkpoint was loaded" if resumed else ""),
                "Save the number of the epoch, and call sampler.set_epoch with it after a resume"
                if resumed
                else "Call sampler.set_epoch(epoch) before each epoch",
                epoch.begin,
                CHAPTER,
                rank.rank,
            )
            return


def _leftover(rank: RankTrace) -> Iterator[Finding]:
    """Backward passes at an epoch's end that no optimizer step follows: their gradients enter the next epoch's first step."""
    left: list[Event] = []
    ended, over = set[str](), 0
    usual = len(rank.steps[0].all("backward")) if rank.steps else 1
    for event in rank.events:
        if event["kind"] in ("step", "skipped", "zero_grad"):
            left, ended, over = [], set(), 0
        elif event["kind"] == "backward":
            if over and len(left) >= usual:  # a loop that counts on from epoch to epoch takes as many as ever
                yield Finding(
                    f"{over} micro-batch{'es' * (over > 1)} at an epoch's end: the gradients enter the next one's first step",
                    "Take an optimizer step after an epoch's last micro-batch too, or drop the rest of the epoch",
                    left[0],
                    "ddp/README.md, chapter 5",
                    rank.rank,
                )
                return
            left.append(event)
        elif event["kind"] == "epoch":
            over = over or (len(left) if event["where"] in ended else 0)
        elif event["kind"] == "epoch_end" and left:
            ended |= {e["where"] for e in rank.all("epoch") if e["iterator"] == event["iterator"]}


def _between(events: list[dict[str, object]], first: object, last: object) -> list[dict[str, object]]:
    return events[events.index(first) : events.index(last)]  # type: ignore[arg-type]
