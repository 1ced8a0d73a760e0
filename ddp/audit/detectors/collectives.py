"""Collectives that do another thing than they seem to."""

from __future__ import annotations

from ddp.audit.detectors.finding import Finding, Findings
from ddp.audit.trace import Trace

CHAPTER = "ddp/conformance/README.md"
WRONG_WITH_GAPS = ("broadcast", "reduce", "reduce_scatter_tensor")


def detect(trace: Trace) -> Findings:
    for event in trace.ranks[0].all("collective"):
        if event["name"] in WRONG_WITH_GAPS and event["gaps"]:
            yield Finding(
                f"{event['name']} of a tensor with gaps in memory (strides {event['gaps'][0]}): gloo sends the memory from its "
                "start and not its elements, without an error (pytorch/pytorch#192920)",
                "Send tensor.contiguous(), and copy it back where it is received",
                event,
                diverges=True,
            )
    for event in trace.ranks[0].all("without_gradient"):
        yield Finding(
            "all_gather of a tensor that requires a gradient: what it returns has none, so the loss sees this rank's part as a "
            "constant",
            "Use torch.distributed.nn.functional.all_gather, or put the rank's own tensor back into its place",
            event,
            chapter="ddp/README.md, chapter 4",
        )
