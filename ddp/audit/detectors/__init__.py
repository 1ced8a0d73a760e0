"""The detectors: each file is about one kind of bug, and its ``detect`` is a function from a trace to findings.

findings.md explains the names of the findings.
"""

from __future__ import annotations

import traceback

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
    reading,
    replicas,
    schedules,
    weights,
)
from ddp.audit.finding import Finding
from ddp.audit.trace import Trace

# In this order: a detector that knows a cause comes before those that see only its effect.
DETECTORS = (
    collectives,
    schedules,
    optimizers,
    averages,
    clipping,
    weights,
    randomness,
    order,
    coverage,
    evaluation,
    checkpoints,
    replicas,
    costs,
    reading,
)


def find(trace: Trace) -> list[Finding]:
    """All that is wrong in a run on two ranks or more, each thing once.

    What is the effect of something else is a finding of its own only if no cause was found.
    """
    findings: dict[tuple[str, str], Finding] = {}
    for detector in DETECTORS:
        try:
            found = list(detector.detect(trace))
        except Exception:
            trace.errors.append(traceback.format_exc(limit=-3))
            continue
        for finding in found:
            if not (finding.is_effect and any(other.diverges for other in findings.values())):
                findings.setdefault((detector.__name__, finding.where), finding)
    return list(findings.values())
