"""A command that fails on rank 1, for tests of what is said then."""

from __future__ import annotations

from common.cli import command
from common.process_group import process_group
from common.rank_logging import rank_logging


@command
def main() -> None:
    with process_group(device="cpu") as place, rank_logging(place), place.together():
        if place.rank == 1:
            raise ZeroDivisionError("on purpose")


if __name__ == "__main__":
    main()
