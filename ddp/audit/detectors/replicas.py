"""All ranks must hold the same weights after each step, and use the same learning rates."""

from __future__ import annotations

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Step, Trace
from ddp.audit.watch.event_types import BeforeStep, JoinBegins, Names, Stepped, Weights


def detect(trace: Trace) -> Findings:
    own = own_of_ranks(trace)
    for steps in trace.steps():
        if why_not(steps):
            return  # each rank has another part
        computed = {number for step in steps for one in step.computed for number in one}  # others may be shards
        for kind, when in ((BeforeStep, "before"), (Stepped, "after")):
            for number in sorted(differing(steps, kind) & computed - own, key=int):
                yield Finding(
                    "weights-differ",
                    steps[0].before,
                    f"the ranks' weights differ {when} this optimizer step, {trace.names.get(number, number)} among them",
                    is_effect=True,
                )
                return
    # A rank may have a model of its own, such as a probe.
    shared = set.intersection(
        *({number for event in rank.all(Names) for number in event.names} for rank in trace.ranks)
    )
    counts = [sum(not shared.isdisjoint(step.own) for step in rank.steps) for rank in trace.ranks]
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


def why_not(steps: list[Step]) -> str:
    """Why a step cannot be judged; empty if it can."""
    return "the parameters are sharded" if any(step.after.sharded for step in steps) else ""


def own_of_ranks(trace: Trace) -> set[str]:
    """Parameters of which each rank has others, as of model parallelism: at the first step, weights and gradients differ.

    They are only if the ranks have replicas, too: if nothing is averaged, all gradients differ.
    """
    for steps in trace.steps():
        differ, (first, *others) = differing(steps, BeforeStep), (step.before.gradients for step in steps)
        same = {number for number in first if all(first[number] == other.get(number) for other in others)}
        has_replicas = any(any(first[number]) for number in same - differ)
        return differ - same if has_replicas else set()
    return set()


def differing(steps: list[Step], kind: type[Weights]) -> set[str]:
    """The parameters whose weights differ between ranks.

    :param kind: before or after the step
    """
    sums = [step.all(kind)[-1].parameters or {} for step in steps]
    shared = set[str].intersection(*map(set, sums))
    return {number for number in shared if any(own[number] != sums[0][number] for own in sums)}
