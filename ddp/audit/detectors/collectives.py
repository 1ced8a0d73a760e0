"""Collectives that do another thing than they seem to."""

from __future__ import annotations

from collections.abc import Iterator

from ddp.audit.detectors.finding import Finding
from ddp.audit.trace import Trace

CHAPTER = "ddp/conformance/README.md"
WRONG_WITH_GAPS = ("broadcast", "reduce", "reduce_scatter_tensor")


def detect(trace: Trace) -> Iterator[Finding]:
    for rank in trace.ranks[:1]:
        for event in rank.all("collective"):
            if event["name"] in WRONG_WITH_GAPS and event["gaps"]:
                yield Finding(
                    f"{event['name']} of a tensor with gaps in memory (strides {event['gaps'][0]}): gloo sends the memory from its "
                    "start and not its elements, without an error (pytorch/pytorch#192920)",
                    "Send tensor.contiguous(), and copy it back where it is received",
                    event,
                    CHAPTER,
                    diverges=True,
                )
        for event in rank.all("without_gradient"):
            yield Finding(
                "all_gather of a tensor that requires a gradient: what it returns has none, so the loss sees this rank's part as a "
                "constant",
                "Use torch.distributed.nn.functional.all_gather, or put the rank's own tensor back into its place",
                event,
                "ddp/README.md, chapter 4",
            )
