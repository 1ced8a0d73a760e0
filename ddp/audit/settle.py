"""Suspicions: a second run confirms them, clears them, or tells nothing about them."""

from __future__ import annotations

from collections.abc import Iterable

from ddp.audit.finding import Finding
from ddp.audit.trace import Trace
from ddp.audit.vary import Variation
from ddp.audit.watch.event_types import Draw

# The comparison that settles a suspicion, by its name.
SETTLES = {
    "samples-on-every-rank": "samples",
    "samples-left-out": "samples",
    "read-by-all": "samples",
    "evaluation-counts-twice": "metrics",
    "evaluates-the-same-part": "metrics",
    "loss-divided-by-ranks": "numbers",
    "saved-by-its-own-value": "saves",
}
# How a run proves these suspicions. Draws for each sample grow with the batch.
PROOFS = {
    "same-noise": " the line draws another number of values, so some for each sample",
    "hash-of-strings": " samples of the same numbers have other contents",
    "same-augmentation": " a step draws another number of values, so some for each sample",
}


def settle(finding: Finding, variations: Iterable[Variation], base: Trace) -> bool | None:
    """Whether a suspicion is right; None if no run tells. A finding that is right gets its proof, and one that is open says why.

    :param variations: the runs so far
    """
    found = [(one, _is_equal(finding, one, base)) for one in variations]
    for one, is_equal in found:
        if is_equal is False:
            finding.proof, finding.unsettled = one.what + PROOFS.get(finding.name, f": {one.text}"), ""
            return True
    if any(is_equal for _, is_equal in found):
        finding.unsettled = ""
        return False
    for one, _ in found:
        if one.plan.kind == "ranks":
            finding.unsettled = f"{one.what}: {one.text}"
    return None


def _is_equal(finding: Finding, variation: Variation, base: Trace) -> bool | None:
    """Whether what a suspicion is about is as it should be in a run."""
    verdict, kind = variation.verdict, variation.plan.kind
    if verdict is None:
        return None
    if kind == "third":
        return verdict.numbers if finding.name == "loss-divided-by-ranks" else None
    if kind != "ranks":
        return None
    if finding.name in COMPARISONS and variation.other:
        return COMPARISONS[finding.name](finding.where, base, variation.other)
    is_equal: bool | None = getattr(verdict, SETTLES.get(finding.name, ""), None)
    return is_equal


def _contents_as_before(_: str, base: Trace, other: Trace) -> bool | None:
    """Whether the samples of the same numbers are the same in all processes."""
    parts = [
        {pair for epoch in rank.training for pair in epoch.numbered()}
        for trace in (base, other)
        for rank in trace.ranks
    ]
    if any(len(part) > len(dict(part)) for part in parts):
        return None  # they are drawn anew within one process
    found = set().union(*parts)
    return len(found) == len(dict(found)) if found else None


def _draws_as_often(_: str, base: Trace, other: Trace) -> bool | None:
    """Whether NumPy and Python draw as much for the first step: if not, but as much as in a later one, they draw for each sample."""
    for number in range(2):
        ours, theirs = ([step.before.generators[number] for step in trace.ranks[0].steps] for trace in (base, other))
        if theirs[0] in ours and len(set(ours)) > 1:
            return theirs[0] == ours[0]
    return None


def _draws_as_before(where: str, base: Trace, other: Trace) -> bool | None:
    """Whether a line draws as much on one rank with larger batches: if not, it draws for each sample."""
    ours, theirs = ([one.shape for one in trace.ranks[0].all(Draw) if one.where == where] for trace in (base, other))
    return ours[0] == theirs[0] if ours and theirs else None


# These are settled by a comparison that no verdict has.
COMPARISONS = {
    "same-noise": _draws_as_before,
    "same-augmentation": _draws_as_often,
    "hash-of-strings": _contents_as_before,
}
