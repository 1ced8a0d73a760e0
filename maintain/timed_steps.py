"""Train some steps for each line that comes in, and answer with the seconds: one side of ``maintain.same_speed``.

It runs in a checkout of any commit. So it uses of the project only what has not changed its name for long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from common.command_line.cli import parse
from common.training.recipes import load_dataset
from ddp.bench.overhead import OverheadConfig, trainer_step
from ddp.config import TrainConfig
from ddp.train import build_job

STEPS = 6  # of a turn


def main() -> None:
    config = parse(TrainConfig, "ddp.train", None, ["--device", "cpu", "--epochs", "1000000", *sys.argv[1:]])
    with OverheadConfig(device="cpu", output=Path(f"{config.run_dir}-bench")).start() as (env, _):
        step = trainer_step(build_job(config, env, load_dataset(config)))
        while True:
            told = torch.tensor(bool(env.is_main and sys.stdin.readline()))
            dist.broadcast(told, 0)
            if not told:
                break
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            if env.is_main:
                print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
