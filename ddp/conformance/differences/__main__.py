"""Run all cases on two ranks, and write the page."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.rendezvous import rendezvous

from ddp.conformance.differences.page import cases, page
from ddp.conformance.differences.program import compare

if __name__ == "__main__":
    store, rank, _ = next(rendezvous("env://"))
    outputs = {name: compare(module.case, store, rank) for name, module in cases().items()}
    if rank == 0:
        (Path(__file__).parent / "README.md").write_text(page(outputs))
