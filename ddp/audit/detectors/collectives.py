"""Collectives that do another thing than they seem to."""

from __future__ import annotations

from ddp.audit.finding import Finding, Findings
from ddp.audit.trace import Trace
from ddp.audit.watch.event_types import Collective, WithoutGradient

WRONG_WITH_GAPS = (
    "broadcast",
    "reduce",
    "all_reduce",
    "scatter",
    "all_to_all_single",
)  # tried with torch 2.11 and 2.14


def detect(trace: Trace) -> Findings:
    for event in trace.ranks[0].all(Collective):
        if event.name in WRONG_WITH_GAPS and event.gaps:
            yield Finding(
                "strided-tensor",
                event,
                f"{event.name} of a tensor with gaps in memory (strides {event.gaps[0]}): gloo sends the memory from its "
                "start and not its elements, without an error (pytorch/pytorch#192920)",
                diverges=True,
            )
    for gathered in trace.ranks[0].all(WithoutGradient):
        yield Finding("gathered-as-constant", gathered)
