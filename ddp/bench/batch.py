"""The test error when the global batch grows with the ranks, and the learning rate with it or not (``python -m ddp.bench batch``).

If each rank keeps its batch, W ranks take a global batch that is W times as large, and W times fewer steps in an epoch. Three
rules for the learning rate are compared, each at every W:

- ``the same rate``
- ``W times the rate``: the linear scaling rule (Goyal et al. 2017, arXiv 1706.02677)
- ``W times the rate, warm-up``: the same, and the rate rises from 0 during the first epoch. (In the paper it rises from the
  rate of one rank, during five epochs.)

W = 1 is also the case that the global batch stays as it is, on any number of ranks. It has no warm-up, which ``ddp.train`` has by
default. Everything else is as there: SGD with momentum, and a cosine decay. A run here is one process, which takes W micro-steps
of one rank's batch. The average of their gradients is that of W ranks, and BatchNorm normalizes with as many samples.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.benchmarking.figures import plot_sweep
from common.benchmarking.turns import Rounds, write_report
from common.command_line.cli import option
from common.data.datasets import IN_MEMORY, ImageData
from common.distributed.dist_env import DistEnv
from common.errors import UsageError
from common.training.evaluation import evaluate
from common.training.recipes import load_dataset
from ddp.config import TrainConfig
from ddp.rendezvous.worker_group import WorkerGroup
from ddp.train import build_job, train_epoch

FIRST = "the same rate"
# For each rule whether the rate grows, and the epochs of its warm-up.
RULES = {FIRST: (False, 0), "W times the rate": (True, 0), "W times the rate, warm-up": (True, 1)}
BATCH_SIZE, LR = 36, 0.025  # of one rank; four ranks have the defaults of ddp.train


@dataclass(frozen=True)
class Config:
    """Settings of ``ddp.bench batch``."""

    dataset: str = option("fashion-mnist", "as in ddp.train", choices=IN_MEMORY)
    train_samples: int | None = option(None, "as in ddp.train", minimum=1)
    epochs: int = option(4, "of each run", minimum=1)
    ranks: tuple[int, ...] = option((1, 2, 4, 8), "values of W", minimum=1, maximum=1024)
    seeds: tuple[int, ...] = option((0, 1), "a run of each", minimum=0)
    output: Path = option(Path("runs/bench-batch"), "folder of the JSON and the figure")

    def run(self, ranks: int, rule: str, seed: int = 0) -> TrainConfig:
        """The settings of one run. At W = 1 only the first rule is run."""
        grows, warmup_epochs = RULES[rule]
        return TrainConfig(
            dataset=self.dataset,
            train_samples=self.train_samples,
            epochs=self.epochs,
            batch_size=BATCH_SIZE * ranks,
            grad_accumulation_steps=ranks,
            lr=LR * ranks if grows else LR,
            warmup_epochs=warmup_epochs,
            seed=seed,
            precision="bf16",
        )


class TrainingWorker:
    """The service of one rank: whole runs of ``ddp.train``, without a run directory."""

    def __init__(self, env: DistEnv, data: ImageData) -> None:
        self._env, self._data = env, data

    def run(self, config: TrainConfig) -> dict[str, Any]:
        """Train, and test at the end.

        :returns: ``steps`` of the optimizer, fewer than all if the guard ended the run because its loss was nan too often; ``error``,
            the share of the test set that was not recognized
        """
        job = build_job(config, self._env, self._data)
        with contextlib.suppress(UsageError):
            while job.epoch < config.epochs:
                train_epoch(job)
                job.epoch += 1
        tested = evaluate(job.network, self._data, self._env, config.precision, job.test_loader)
        return {"steps": job.step, "error": 1 - tested.accuracy}


def measure(config: Config) -> list[dict[str, Any]]:
    """For each W and rule a row with the learning rate, and with the ``runs``, one for each seed."""
    cases = [(ranks, rule) for ranks in config.ranks for rule in RULES if ranks > 1 or rule == FIRST]
    data = load_dataset(config.run(1, FIRST))
    rows = []
    with Rounds(len(cases)) as progress, WorkerGroup(1, TrainingWorker, data) as group:
        for ranks, rule in progress.until_stopped(cases):
            runs = [group.call("run", config.run(ranks, rule, seed))[0] for seed in config.seeds]
            rows.append({"ranks": ranks, "rule": rule, "lr": config.run(ranks, rule).lr, "runs": runs})
            progress.round_done(f"{ranks} times the batch")
    return rows


def report(config: Config, rows: list[dict[str, Any]]) -> str:
    """Write the JSON and the figure, and return the table."""
    title = f"{config.dataset}, {config.epochs} epochs; W = 1: batches of {BATCH_SIZE}, learning rate {LR}"
    lines = [f"{title}; for each seed its steps and test error, %"]
    sizes = sorted(config.ranks)
    curves: dict[str, Any] = {rule: {} for rule in RULES}
    for row in rows:
        ranks, rule, runs = row["ranks"], row["rule"], row["runs"]
        for curve in RULES if ranks == 1 else (rule,):
            curves[curve][sizes.index(ranks)] = [100 * run["error"] for run in runs]
        outcomes = "   ".join(f"{run['steps']:>4} {100 * run['error']:6.2f}" for run in runs)
        lines.append(f"  W = {ranks}, {rule:<28}learning rate {row['lr']:<8g}{outcomes}")
    plot_sweep(
        config.output / "batch.png",
        "W: ranks, each with its own batch",
        sizes,
        {"": {rule: points for rule, points in curves.items() if points}},
        title=title,
        y_title="test error, %",
    )
    return write_report(config, "batch", {"rows": rows}, ["batch"], lines)
