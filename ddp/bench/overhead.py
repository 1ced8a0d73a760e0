"""The cost of the trainer's step on top of the mathematics (``python -m ddp.bench overhead``).

Three loops take turns, a few steps each:

- ``bare``: forward, loss, backward and optimizer on one batch that is already on the device. No DDP.
- ``bare, DDP``: the same with the model wrapped by DDP. With one rank this adds the cost of DDP itself; with several ranks it
  also adds the all-reduce of the gradients.
- ``trainer``: the step of ``ddp.train``: it fetches, augments and moves each batch, seeds, sets the learning rate, and
  accumulates metrics.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.cli import option, parse
from common.data.datasets import Batch
from common.distributed.process_group import BACKENDS, DEVICES, DistEnv, process_group
from common.distributed.rank_logging import Progress, rank_logging
from common.files.run_directory import files_line, prepare_output, results_in
from common.reporting.benchmark import write_results
from common.reporting.benchmark_figures import plot_ratios
from common.reporting.timing import Spread, interleave, paired_ratios
from common.training.models import MODELS
from common.training.optimization import build_optimizer
from common.training.precision import PRECISIONS, autocast
from common.training.recipes import load_dataset
from ddp.bench.step_loops import timed, trainer_step
from ddp.config import TrainConfig, require_samples
from ddp.job import Job
from ddp.train import build_job, wrap_network

LIMIT = 1.05
WARMUP = 2


@dataclass(frozen=True)
class OverheadConfig:
    """Settings of ``ddp.bench overhead``."""

    model: str = option("fashion-cnn", "the model whose step is timed", choices=MODELS)
    image_size: int = option(None, "as in ddp.train", minimum=8, maximum=1024)
    batch_size: int = option(144, "samples per step, over all ranks", minimum=1, maximum=12_000)
    precision: str = option("fp32", "as in ddp.train", choices=PRECISIONS)
    workers: int = option(0, "loader processes per rank, as in ddp.train", minimum=0)
    builds: int = option(
        4,
        "times that all loops are rebuilt: memory placement alone can change a loop's time by a few percent",
        minimum=1,
    )
    rounds: int = option(8, "rounds per build that count", minimum=2)
    steps: int = option(10, "steps of each loop in a round", minimum=1)
    device: str = option("auto", "as in ddp.train", choices=DEVICES)
    backend: str = option("auto", "as in ddp.train", choices=BACKENDS)
    interface: str | None = option(None, "as in ddp.train", per_node=True)
    threads: int = option(0, "as in ddp.train", minimum=0)
    output: Path = option(Path("runs/bench-overhead"), "folder of the JSON and the PNG", per_node=True)

    def __post_init__(self) -> None:
        _ = self.training  # which may be wrong

    @property
    def training(self) -> TrainConfig:
        """Of the trainer's loop."""
        return TrainConfig(
            model=self.model,
            image_size=self.image_size,
            batch_size=self.batch_size,
            precision=self.precision,
            workers=self.workers,
            epochs=10**6,  # the learning-rate schedule needs an end; the benchmark stops long before it
        )


def main(argv: Sequence[str]) -> None:
    config = parse(OverheadConfig, "ddp.bench overhead", __doc__, argv)
    with (
        process_group(config.device, config.backend, threads=config.threads, settings=config) as env,
        rank_logging(env),
    ):
        with env.fail_together():
            require_samples(config.model, config.batch_size, env.world_size)
            prepare_output(config.output)
        seconds = measure(config, env)
        if env.is_main:
            with results_in(config.output):
                print(report(config, env, seconds))


def measure(config: OverheadConfig, env: DistEnv) -> dict[str, list[float]]:
    """Measure the seconds per step of each loop, one entry per round."""
    train_config = config.training
    data = load_dataset(train_config)
    seconds: dict[str, list[float]] = {}
    with Progress(env, "bench", config.builds * (config.rounds + WARMUP)) as progress:
        for _ in range(config.builds):
            job = build_job(train_config, env, data)
            loops = {
                "bare": _steps(config, env, _bare_loop(job, with_ddp=False)),
                "bare, DDP": _steps(config, env, _bare_loop(job, with_ddp=True)),
                "trainer": _steps(config, env, trainer_step(job)),
            }
            taken = interleave(loops, config.rounds, WARMUP, lambda done: progress.advance(1, f"round {done}"))
            for name, values in taken.items():
                seconds.setdefault(name, []).extend(values)
    return seconds


def report(config: OverheadConfig, env: DistEnv, seconds: dict[str, list[float]]) -> str:
    """Write the JSON and the PNG, and return the summary to print."""
    against = "bare" if env.world_size == 1 else "bare, DDP"
    ratios = {name: paired_ratios(seconds[name], seconds[against]) for name in seconds if name != against}
    write_results(
        config.output / "overhead.json",
        {"world_size": env.world_size, "seconds_per_step": seconds, "against": against},
    )
    title = f"{config.model}, {env.world_size} rank(s), global batch {config.batch_size}, {config.precision}"
    plot_ratios(
        config.output / "overhead.png",
        {"": ratios},
        title=title,
        x_title=f"time per step, as a multiple of '{against}'",
        limit=LIMIT,
    )
    lines = [f"{title}; {config.builds} x {config.rounds} rounds of {config.steps} steps, median [quartiles]"]
    lines += [
        f"{name:>10}: {Spread.of([1000 * s for s in values]):.2f} ms per step" for name, values in seconds.items()
    ]
    lines += [f"{name:>10} / {against}: {Spread.of(values):.3f}" for name, values in ratios.items()]
    return "\n".join([*lines, files_line(config.output, ("overhead.json", "overhead.png"))])


def _steps(config: OverheadConfig, env: DistEnv, step: Callable[[], None]) -> Callable[[], float]:
    def run() -> None:
        for _ in range(config.steps):
            step()

    return timed(env, config.steps, run)


def _bare_loop(job: Job, with_ddp: bool) -> Callable[[], None]:
    """The mathematics of one step, on a copy of the model and one batch that is already on the device."""
    network = copy.deepcopy(job.network)
    model: nn.Module = wrap_network(network, job.env, job.config.averaging) if with_ddp else network
    optimizer = build_optimizer("sgd", network.parameters(), momentum=0.9, weight_decay=5e-4)
    images, labels = _first_batch(job)
    precision, device = job.config.precision, job.env.device
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def step() -> None:
        with autocast(device, precision):
            loss = F.cross_entropy(model(images).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _first_batch(job: Job) -> tuple[Tensor, Tensor]:
    batch: Batch = next(iter(job.loader))
    images = job.data.to_input(batch.images.to(job.env.device), job.config.memory_format)
    return images, batch.labels.to(job.env.device)
