"""A service for standing ranks, and a command that has two of them, for tests of what is left when it ends."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import numpy.typing as npt
import psutil
import torch

from common.cli import UsageError, command
from common.process_group import Place
from common.standing_ranks import StandingRanks


class Service:
    """What a rank does for the tests; the one that is ``broken`` cannot even be built."""

    def __init__(self, place: Place, shared: torch.Tensor | None = None, broken: int | None = None) -> None:
        self.place, self.shared = place, shared
        if place.rank == broken:
            raise UsageError(f"no service on {broken}")

    def where(self) -> tuple[int, int, int, str]:
        return self.place.rank, self.place.world_size, os.getpid(), str(self.place.device)

    def total(self, value: float) -> float:
        return self.place.sum_over_ranks(torch.tensor(value * (self.place.rank + 1))).item()

    def threads(self) -> int:
        return torch.get_num_threads()

    def scaled(self, values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
        return {"values": values * self.place.rank}

    def add_rank(self, mine: torch.Tensor) -> float:
        """To this rank's element of both tensors; the sum of the one that was given at the start, before."""
        assert self.shared is not None
        before = self.shared.sum().item()
        torch.distributed.barrier()
        for tensor in (self.shared, mine):
            tensor[self.place.rank] += self.place.rank + 1
        return before

    def a_tensor(self) -> torch.Tensor:
        return torch.full((3,), float(self.place.rank))

    def fail(self, rank: int, how: str) -> None:
        """On one rank, while the others wait for it in an all-reduce."""
        if self.place.rank != rank:
            self.total(1.0)
        elif how == "mistake":
            raise UsageError("--flag 3 is wrong")
        elif how == "result":
            return lambda: None  # type: ignore[return-value]
        elif how == "exit":
            sys.exit(7)
        elif how == "sleep":
            self.sleep(600)
        raise ZeroDivisionError("on purpose")

    def sleep(self, seconds: float) -> None:
        print("asleep", flush=True)
        time.sleep(seconds)


@command
def main() -> None:
    """Says which processes are below it, and ends, or falls asleep itself, or has rank 1 sleep while rank 0 waits for it."""
    mode = sys.argv[1]
    with StandingRanks(2, Service, torch.ones(2), threads=1) as ranks:
        print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
        if mode == "error":
            raise UsageError("the end")
        if mode == "busy":
            ranks.call("fail", 1, "sleep")
        if mode == "idle":
            print("asleep", flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main()
