"""All ranks must hold the same weights after each step, and use the same learning rates."""

from __future__ import annotations

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.trace import Step, Trace
from ddp.audit.watch.event_types import BeforeStep, JoinBegins, Stepped, Weights


def detect(trace: Trace) -> Findings:
    for steps in trace.steps():
        if any(step.after.sharded for step in steps):
            return  # each rank has another part
        computed = [set[str]().union(*step.computed) for step in steps]  # other parameters may be shards
        for kind, when in ((BeforeStep, "before"), (Stepped, "after")):
            for number in sorted(differing(steps, kind).intersection(*computed), key=int):
                yield Finding(
                    "weights-differ",
                    steps[0].before,
                    f"the ranks' weights differ {when} this optimizer step, {trace.names.get(number, number)} among them",
                    is_effect=True,
                )
                return
    counts = [len(rank.steps) for rank in trace.ranks]
    fewest, most = counts.index(min(counts)), counts.index(max(counts))
    if fewest != most and not any(rank.all(JoinBegins) for rank in trace.ranks):
        yield Finding(
            "step-counts-differ",
            trace.ranks[most].steps[-1].before,
            f"rank {fewest} took {min(counts)} optimizer steps and rank {most} took {max(counts)}",
            fewest,
            diverges=True,
            is_effect=True,
        )


def unjudged(trace: Trace) -> str:
    """Why no step could be judged; empty if one was."""
    return "the parameters are sharded" if trace.ranks[0].steps[0].after.sharded else ""


def differing(steps: list[Step], kind: type[Weights]) -> set[str]:
    """The parameters whose weights differ between ranks.

    :param kind: before or after the step
    """
    sums = [step.all(kind)[-1].parameters or {} for step in steps]
    shared = set[str].intersection(*map(set, sums))
    return {number for number in shared if any(own[number] != sums[0][number] for own in sums)}
