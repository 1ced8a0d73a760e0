"""Run cases on two ranks, with torch's DDP and then with ours.

torchrun --nproc_per_node=2 -m ddp.conformance.differences two_backwards    # prints what one case comes to
torchrun --nproc_per_node=2 -m ddp.conformance.differences                  # runs all, and writes the page
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.cli import command
from common.errors import UsageError
from ddp.conformance.differences.page import cases, page
from ddp.conformance.differences.program import compare, shared_store


@command
def main() -> None:
    all_cases, names = cases(), sys.argv[1:]
    if "--help" in names:
        print(__doc__)
        return
    if unknown := [name for name in names if name not in all_cases]:
        raise UsageError(f"{unknown[0]}: there is no such case; the cases are {', '.join(all_cases)}")
    store, rank = shared_store()
    outputs = {name: compare(all_cases[name], store, rank) for name in names or all_cases}
    if rank == 0 and names:
        print("\n".join(line for lines in outputs.values() for line in lines))
    elif rank == 0:
        (Path(__file__).parent / "README.md").write_text(page(outputs))


if __name__ == "__main__":
    main()
