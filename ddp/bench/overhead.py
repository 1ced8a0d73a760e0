"""The cost of the trainer's step on top of the mathematics (``python -m ddp.bench overhead``).

Three loops take turns, a few steps each:

- ``bare``: forward, loss, backward and optimizer on one batch that is already on the device. No DDP.
- ``bare, DDP``: the same with the model wrapped by DDP. With one rank this adds the cost of DDP itself; with several ranks it
  also adds the all-reduce of the gradients.
- ``trainer``: the step of ``ddp.train``: it fetches, augments and moves each batch, seeds, sets the learning rate, and
  accumulates metrics.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from common.cli import option, parse
from common.data.datasets import Batch
from common.distributed.process_group import BACKENDS, DEVICES, DistEnv, process_group
from common.distributed.rank_logging import rank_logging
from common.files.run_directory import files_line, prepare_output, results_in
from common.reporting.benchmark_figures import plot_rounds
from common.reporting.timing import Spread, paired_ratios
from common.reporting.turns import Step, Times, cells, progress_of, take_turns, timed_steps, write_results
from common.training.models import MODELS
from common.training.optimization import build_optimizer
from common.training.precision import PRECISIONS, autocast
from common.training.recipes import load_dataset
from ddp.bench.variants import DDPVariant
from ddp.config import TrainConfig, require_samples
from ddp.job import Job
from ddp.train import build_job, train_step

LIMIT = 1.05
BARE, BARE_DDP, TRAINER = "bare", "bare, DDP", "trainer"


@dataclass(frozen=True)
class OverheadConfig:
    """Settings of ``ddp.bench overhead``."""

    model: str = option("fashion-cnn", "the model whose step is timed", choices=MODELS)
    image_size: int = option(None, "as in ddp.train", minimum=8, maximum=1024)
    batch_size: int = option(144, "samples per step, over all ranks", minimum=1, maximum=12_000)
    precision: str = option("fp32", "as in ddp.train", choices=PRECISIONS)
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
        """The settings of the trainer's loop."""
        return TrainConfig(
            model=self.model,
            image_size=self.image_size,
            batch_size=self.batch_size,
            precision=self.precision,
            run_dir=self.output / "checkpoints",
            epochs=10**6,  # the learning-rate schedule needs an end; the benchmark stops long before it
        )

    @contextlib.contextmanager
    def start(self) -> Iterator[DistEnv]:
        """Join the process group for a block, and prepare the output folder.

        :raises UsageError: for a folder that cannot be written, or a batch that the ranks cannot divide
        """
        group = process_group(self.device, self.backend, threads=self.threads, settings=self)
        with group as env, rank_logging(env):
            with env.fail_together():
                require_samples(self.model, self.batch_size, env.world_size)
                prepare_output(self.output)
            yield env


def main(argv: Sequence[str]) -> None:
    config = parse(OverheadConfig, "ddp.bench overhead", __doc__, argv)
    with config.start() as env:
        data = load_dataset(config.training)

        def job() -> Job:
            return build_job(config.training, env, data)

        loops = {
            BARE: lambda _: bare_step(job(), "none"),
            BARE_DDP: lambda _: bare_step(job(), "torch"),
            TRAINER: lambda _: trainer_step(job()),
        }
        seconds = measure(config, env, loops)
        against = BARE if env.world_size == 1 else BARE_DDP
        compared = {name: against for name in loops if name != against}
        report(config, env, "overhead", seconds, compared, LIMIT, {"against": against})


def bare_step(job: Job, wrapper: str) -> Step:
    """The mathematics of one step, on a copy of the model and one batch that is already on the device.

    :param wrapper: of :class:`ddp.bench.variants.DDPVariant`
    """
    network = copy.deepcopy(job.network)
    model = DDPVariant(wrapper).wrap(network)
    optimizer = build_optimizer("sgd", network.parameters(), momentum=0.9, weight_decay=5e-4)
    batch: Batch = next(iter(job.loader))
    precision, device = job.config.precision, job.env.device
    images = job.data.to_input(batch.images.to(device), job.config.memory_format)
    labels = batch.labels.to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def step() -> None:
        with autocast(device, precision):
            loss = F.cross_entropy(model(images).float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def endless_batches(job: Job) -> Iterator[Batch]:
    """Yield this rank's batches, epoch after epoch."""
    for epoch in itertools.count():
        job.sampler.set_epoch(epoch)
        yield from job.window.timed(job.guard.batches(job.loader))


def trainer_step(job: Job) -> Step:
    """The step of ``ddp.train`` on successive batches. Metrics are reduced every ``log_every`` steps."""
    job.model.train()
    batches = endless_batches(job)

    def step() -> None:
        train_step(job, batches)
        if job.step % job.config.log_every == 0:
            job.window.reduce(job.env)

    return step


def measure(config: OverheadConfig, env: DistEnv, loops: Mapping[str, Callable[[ExitStack], Step]]) -> Times:
    """Measure the seconds per step of each loop, one entry per round.

    :param loops: functions that build a loop; what they enter on the stack is left when all loops are built anew
    """

    @contextlib.contextmanager
    def build(names: list[str]) -> Iterator[dict[str, Callable[[], float]]]:
        with ExitStack() as stack:
            yield {name: functools.partial(_turn, loops[name](stack), config.steps, env) for name in names}

    with progress_of(config, 1, env) as progress:
        return take_turns(config, loops, build, progress, f"{config.steps} steps a turn")


def _turn(step: Step, steps: int, env: DistEnv) -> float:
    return timed_steps(step, steps, env.device)[0]


def report(
    config: OverheadConfig,
    env: DistEnv,
    name: str,
    seconds: Times,
    against: Mapping[str, str],
    limit: float,
    content: Mapping[str, object],
) -> None:
    """Write the JSON and the figure, and print the summary; on rank 0.

    :param name: of the benchmark and its files
    :param against: for each loop the loop that it is compared with
    :param limit: the largest ratio that is allowed, drawn as a line
    :param content: what else the JSON holds
    """
    if not env.is_main:
        return
    ratios = {f"{loop} / {other}": paired_ratios(seconds[loop], seconds[other]) for loop, other in against.items()}
    title = f"{config.model}, {env.world_size} rank(s), global batch {config.batch_size}, {config.precision}"
    with results_in(config.output):
        results = {"world_size": env.world_size, "seconds_per_step": seconds, "ratios": ratios}
        write_results(config.output / f"{name}.json", {**results, **content})
        x_title = "ratio of the times per step"
        plot_rounds(config.output / f"{name}.png", {"": ratios}, title=title, x_title=x_title, limit=limit, spec=".3f")
    print(f"{title}; {config.builds} x {config.rounds} rounds of {config.steps} steps, median [quartiles]")
    for loop, milliseconds in cells(seconds, ".2f", 1e3).items():
        print(f"{loop:>24}: {milliseconds} ms per step")
    for pair, values in ratios.items():
        print(f"{pair:>48}: {Spread.of(values):.3f}")
    print(files_line(config.output, (f"{name}.json", f"{name}.png")))
