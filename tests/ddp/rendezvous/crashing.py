"""A command that fails on rank 1, for tests of what is said then."""

from __future__ import annotations

from common.command_line.cli import command
from common.distributed.rank_logging import rank_logging
from ddp.rendezvous.process_group import process_group


@command
def main() -> None:
    with process_group(device="cpu") as env, rank_logging(env), env.fail_together():
        if env.rank == 1:
            raise ZeroDivisionError("on purpose")


if __name__ == "__main__":
    main()
