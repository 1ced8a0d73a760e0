"""The detectors: each is a function from a trace to findings, and each file is about one kind of bug."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence

from ddp.audit.detectors import (
    averages,
    checkpoints,
    clipping,
    collectives,
    costs,
    coverage,
    evaluation,
    optimizers,
    order,
    randomness,
    replicas,
    schedules,
    weights,
)
from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Trace

# In this order: a detector that knows a cause comes before those that see only its effect.
DETECTORS: Sequence[Callable[[Trace], Iterable[Finding]]] = (
    collectives.detect,
    schedules.detect,
    optimizers.detect,
    clipping.detect,
    averages.detect,
    weights.detect,
    randomness.detect,
    order.detect,
    coverage.detect,
    evaluation.detect,
    checkpoints.detect,
    replicas.detect,
    costs.detect,
)


def find(trace: Trace) -> list[Finding]:
    """All that is wrong in a run, each thing once.

    Ranks that differ are the effect of something else. They are a finding of their own only if no cause was found.
    """
    findings: dict[tuple[str, str], Finding] = {}
    for detect in DETECTORS:
        try:
            found = list(detect(trace))
        except Exception:
            trace.errors.append({"what": detect.__module__, "text": traceback.format_exc(limit=-3)})
            continue
        for finding in found:
            explained = any(other.diverges for other in findings.values())
            if not (detect is replicas.detect and explained):
                findings.setdefault((detect.__module__, finding.where), finding)
    return list(findings.values())
