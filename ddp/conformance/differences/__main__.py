"""Run all cases on two ranks, and write the page."""

from __future__ import annotations

from pathlib import Path

from common.cli import command
from ddp.conformance.differences.page import cases, page
from ddp.conformance.differences.program import compare, meet


@command
def main() -> None:
    store, rank = meet()
    outputs = {name: compare(module.case, store, rank) for name, module in cases().items()}
    if rank == 0:
        (Path(__file__).parent / "README.md").write_text(page(outputs))


if __name__ == "__main__":
    main()
