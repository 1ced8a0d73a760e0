"""The cost of the trainer's step on top of the mathematics (``python -m ddp.bench overhead``).

Three loops take turns, a few steps each:

- ``bare loop``: forward, loss, backward and optimizer on one batch that is already on the device. No DDP.
- ``bare loop in DDP``: the same with the model wrapped by DDP. With one rank this adds the cost of DDP itself; with several ranks it
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

from common.benchmarking.figures import plot_rounds
from common.benchmarking.other_work import OtherWork
from common.benchmarking.timing import Spread, paired_ratios
from common.benchmarking.turns import Step, Times, cells, progress_of, take_turns, timed_steps, write_report
from common.command_line.cli import option, parse
from common.data.datasets import Batch
from common.distributed import DEVICES
from common.distributed.dist_env import DistEnv
from common.distributed.rank_logging import rank_logging
from common.files.run_directory import prepare_output, results_in
from common.models.build import MODELS
from common.training.optimization import build_optimizer
from common.training.precision import PRECISIONS, autocast
from common.training.recipes import load_dataset
from ddp.bench.variants import DDPVariant
from ddp.config import TrainConfig, require_samples
from ddp.job import Job
from ddp.rendezvous.process_group import process_group
from ddp.train import build_job, train_step

BARE, BARE_DDP, TRAINER = "bare loop", "bare loop in DDP", "trainer"


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
    def start(self) -> Iterator[tuple[DistEnv, Callable[[], Job]]]:
        """Join the process group for a block, and prepare the output folder. The block also gets a function that builds a job.

        :raises UsageError: for a folder that cannot be written, or a batch that the ranks cannot divide
        """
        with process_group(self.device, settings=self) as env, rank_logging(env):
            with env.fail_together():
                require_samples(self.model, self.batch_size, env.world_size)
                prepare_output(self.output)
            data = load_dataset(self.training)
            others = OtherWork()
            yield env, lambda: build_job(self.training, env, data)
            if env.is_main:
                others.warn()


def main(argv: Sequence[str]) -> None:
    config = parse(OverheadConfig, "ddp.bench overhead", __doc__, argv)
    with config.start() as (env, job):
        loops = {
            BARE: lambda _: bare_step(job(), "none"),
            BARE_DDP: lambda _: bare_step(job(), "torch"),
            TRAINER: lambda _: trainer_step(job()),
        }
        seconds = measure(config, env, loops)
        against = BARE if env.world_size == 1 else BARE_DDP
        compared = {name: against for name in loops if name != against}
        report(config, env, "overhead", seconds, compared, {"against": against})


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
        yield from job.guard.batches(job.loader)


def trainer_step(job: Job, batches: Iterator[Batch] | None = None) -> Step:
    """The step of ``ddp.train`` on successive batches. Metrics are reduced every ``log_every`` steps.

    :param batches: those of the job when None
    """
    job.model.train()
    batches = batches or endless_batches(job)

    def step() -> None:
        train_step(job, batches)
        if job.step % job.config.log_every == 0:
            job.window.reduce(job.env)

    return step


def measure(config: OverheadConfig, env: DistEnv, loops: Mapping[str, Callable[[ExitStack], Step]]) -> Times:
    """Measure the seconds per step of each loop, one entry per round.

    :param loops: functions that build a loop; what they enter on the stack is left when all loops are built anew
    """

    def turn(step: Step) -> float:
        return timed_steps(step, config.steps, env.device)[0]

    @contextlib.contextmanager
    def build(names: list[str]) -> Iterator[dict[str, Callable[[], float]]]:
        with ExitStack() as stack:
            yield {name: functools.partial(turn, loops[name](stack)) for name in names}

    with progress_of(config, 1, env) as progress:
        return take_turns(config, loops, build, progress, f"{config.steps} steps a turn")


def report(
    config: OverheadConfig,
    env: DistEnv,
    name: str,
    seconds: Times,
    against: Mapping[str, str],
    content: Mapping[str, object],
) -> None:
    """Write the JSON and the figure, and print the summary; on rank 0.

    :param name: of the benchmark and its files
    :param against: for each loop the loop that it is compared with
    :param content: what else the JSON holds
    """
    if not env.is_main:
        return
    ratios = {f"{loop} / {other}": paired_ratios(seconds[loop], seconds[other]) for loop, other in against.items()}
    title = f"{config.model}, {env.world_size} rank{'s' * (env.world_size > 1)}, global batch {config.batch_size}, {config.precision}"
    lines = [f"{title}; {config.builds} x {config.rounds} rounds of {config.steps} steps, median [quartiles]"]
    lines += [f"{loop:>24}: {milliseconds} ms per step" for loop, milliseconds in cells(seconds, ".2f", 1e3).items()]
    for pair, values in ratios.items():
        ratio = Spread.of(values)
        lines.append(f"{pair:>48}: {ratio:.3f}{' (within the noise: as fast)' if ratio.within_noise() else ''}")
    results = {"world_size": env.world_size, "seconds_per_step": seconds, "ratios": ratios, **content}
    with results_in(config.output):
        x_title = "ratio of the times per step; below 1: the first takes less"
        figure = config.output / f"{name}.png"
        plot_rounds(figure, {"": ratios}, title=title, x_title=x_title, spec=".3f", scale="near")
        print(write_report(config, name, results, [name], lines))
