"""A service for worker groups, and a command that uses them, for tests of what is left when it ends."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time

import numpy as np
import numpy.typing as npt
import psutil
import torch

from common.command_line.cli import command
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from ddp.rendezvous.worker_group import WorkerGroup


class Service:
    """The work of a rank in the tests; the one that is ``broken`` cannot even be built."""

    def __init__(self, env: DistEnv, shared: torch.Tensor | None = None, broken: int | None = None) -> None:
        self.env, self.shared = env, shared
        if env.rank == broken:
            raise UsageError(f"no service on {broken}")

    def where(self) -> tuple[int, int, int, str]:
        return self.env.rank, self.env.world_size, os.getpid(), str(self.env.device)

    def total(self, value: float) -> float:
        return self.env.sum_over_ranks(torch.tensor(value * (self.env.rank + 1), device=self.env.device)).item()

    def threads(self) -> int:
        return torch.get_num_threads()

    def scaled(self, values: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float32]]:
        return {"values": values * self.env.rank}

    def add_rank(self, mine: torch.Tensor) -> float:
        """To this rank's element of both tensors; the sum of the one that was given at the start, before."""
        assert self.shared is not None
        before = self.shared.sum().item()
        torch.distributed.barrier()
        for tensor in (self.shared, mine):
            tensor[self.env.rank] += self.env.rank + 1
        return before

    def a_tensor(self) -> torch.Tensor:
        return torch.full((3,), float(self.env.rank))

    def fail(self, rank: int, how: str) -> None:
        """On one rank, while the others wait for it in an all-reduce."""
        if self.env.rank != rank:
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


def two_jobs() -> None:
    """One has nothing to do; in the other, rank 0 waits for rank 1, which sleeps. Names the processes below this one."""
    with WorkerGroup(1, Service, threads=1), WorkerGroup(2, Service, torch.ones(2), threads=1) as busy:
        print(*(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
        busy.call("fail", 1, "sleep")


@command
def main() -> None:
    """Waits for Ctrl-C, has a job that comes to its end, and waits to be killed."""
    faulthandler.dump_traceback_later(200, exit=True)  # if it hangs, the test shows where
    with contextlib.suppress(KeyboardInterrupt):
        two_jobs()
    with WorkerGroup(2, Service, threads=1) as ranks:
        ranks.call("total", 1.0)
    two_jobs()


if __name__ == "__main__":
    main()
