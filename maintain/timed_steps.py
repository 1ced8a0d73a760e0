"""Train when told to, and answer with the seconds: one side of ``maintain.same_speed``, run in a checkout of any commit.

So it uses of the project only what has not changed its name for long.
"""

from __future__ import annotations

import contextlib
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

import torch
import torch.distributed as dist

from common.cli import parse
from common.training.recipes import load_dataset
from ddp.bench.overhead import OverheadConfig, trainer_step
from ddp.config import TrainConfig
from ddp.train import build_job


def main(address: str, steps: str, *flags: str) -> None:
    config = parse(TrainConfig, "ddp.train", None, flags)
    bench = OverheadConfig(device="cpu", output=Path(str(config.run_dir) + "-bench"))
    with contextlib.ExitStack() as stack:
        env, _ = stack.enter_context(bench.start())
        step = trainer_step(build_job(config, env, load_dataset(config)))
        parent = stack.enter_context(Client(address)) if env.is_main else None
        go_on = torch.ones(1)
        while True:
            if parent is not None:
                go_on.fill_(parent.recv())
            dist.broadcast(go_on, 0)
            if not go_on:
                break
            start = time.perf_counter()
            for _ in range(int(steps)):
                step()
            dist.barrier()
            if parent is not None:
                parent.send(time.perf_counter() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
