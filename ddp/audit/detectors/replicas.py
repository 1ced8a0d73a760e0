"""All ranks must hold the same weights after each step, and use the same learning rates."""

from __future__ import annotations

from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Trace

CHAPTER = "ddp/README.md, chapter 4"


def detect(trace: Trace) -> Iterator[Finding]:
    for steps in trace.steps():
        for kind, when in (("before_step", "before"), ("step", "after")):
            sums = [step.last(kind).get("parameters") or {} for step in steps]
            if any(step.last("step").get("sharded") for step in steps):
                return  # each rank has another part
            computed = [{n for one in step.all("backward") for n in one.get("computed", ())} for step in steps]
            for number in sorted(set.intersection(*map(set, sums), *computed), key=int):  # others may be shards
                if len({own[number] for own in sums}) > 1:
                    name = trace.names.get(number, number)
                    yield Finding(
                        f"the ranks' weights differ {when} this optimizer step, {name} among them",
                        "Start from the same weights (DDP sends rank 0's), average the gradients, and let all ranks step alike",
                        steps[0].last("before_step"),
                        CHAPTER,
                        is_effect=True,
                    )
                    return
    counts = [len(rank.steps) for rank in trace.ranks]
    if len(set(counts)) > 1 and not any(rank.all("join") for rank in trace.ranks):
        fewest = counts.index(min(counts))
        yield Finding(
            f"rank {fewest} took {min(counts)} optimizer steps and rank {counts.index(max(counts))} took {max(counts)}",
            "Give all ranks the same number of batches, or use DDP's join"
            if min(counts)
            else "Let every rank step its optimizer",
            trace.ranks[counts.index(max(counts))].steps[-1].last("before_step"),
            CHAPTER,
            rank=fewest,
            diverges=True,
            is_effect=True,
        )
