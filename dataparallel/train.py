"""Train a network on several devices from one process: ddp/train.py with the other mechanism.

    python -m dataparallel.train --devices cpu,cpu

Lay the two side by side. There is no torchrun here, no process group, no rank, and no sampler that divides the samples: the
whole global batch goes into the wrapped model, which scatters it over the devices, runs a replica on each in a thread, and
gathers the logits on the first device. There the loss is computed, once, and there the optimizer finds the sum of the
replicas' gradients. BatchNorm's running statistics are those that the first replica has seen.

With one device this is ``ddp.train`` in one process, bit for bit. With several, dropout on GPUs draws as ddp.train's ranks do;
CPU "devices" draw from one generator, in the order in which their threads come to it, so that only ``--dropout 0`` gives the
same run again.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from common.command_line.cli import command, option, parse
from common.command_line.stdout import print_results
from common.data import fashion_mnist
from common.data.datasets import Batch, ImageData, Images, fetch_batches
from common.data.on_device import kept_on_device
from common.device_errors import device_errors
from common.distributed.dist_env import DistEnv, require_alone
from common.distributed.rank_logging import Progress, add_log_file, rank_logging
from common.errors import UsageError
from common.files.atomic_files import write_bytes, write_json
from common.files.run_directory import CONFIG_FILE, LOG_FOLDER, MODEL_FILE, prepare, require_lock, writing
from common.machine import usable_cores
from common.models.build import LEAST_SAMPLES, build_model
from common.models.modules import to_device
from common.randomness import derive_seed, seed_torch, shuffled
from common.reporting.provenance import describe_machine
from common.signals.stop_request import stop_signals
from common.training.evaluation import evaluate, evaluation_batch_size, predict, samples_shown
from common.training.metrics import MetricsWriter
from common.training.optimization import build_optimizer, set_learning_rate
from common.training.precision import autocast, set_arithmetic
from common.training.recipes import LearningConfig, load_dataset, require_a_batch
from common.training.window import Window, WindowTotals, end_window, epoch_line, epoch_record
from dataparallel.devices import parse_devices
from dataparallel.parallel import HandwrittenDataParallel

logger = logging.getLogger("dataparallel.train")

WRAPPERS = ("handwritten", "torch")


@dataclass(frozen=True)
class DataParallelConfig(LearningConfig):
    """One run's settings: those of :class:`LearningConfig`, and what one process with many devices adds.

    :raises UsageError: for settings that contradict each other
    """

    devices: str = option(
        "auto", "cuda:0,cuda:1 or cpu,cpu; auto takes all GPUs, or CPU threads where there are not two"
    )
    wrapper: str = option(
        "handwritten", "dataparallel/parallel.py, or torch's nn.DataParallel (which needs GPUs)", choices=WRAPPERS
    )
    threads: int = option(0, "CPU threads, which CPU devices share; 0 takes the usable cores", minimum=0, maximum=1024)
    run_dir: Path = option(None, "directory of this run's results (default: runs/dataparallel-DATASET-MODEL)")
    overwrite: bool = option(False, "delete the run that is in the run directory")
    log_every: int = option(20, "steps between two records of loss and throughput", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._default("run_dir", Path("runs", f"dataparallel-{self.run_name}"))


@command
def main() -> None:
    config = parse(DataParallelConfig, "dataparallel.train", __doc__)
    require_alone("dataparallel.train")
    devices = parse_devices(config.devices)
    if config.wrapper == "torch" and devices[0].type == "cpu":
        raise UsageError("--wrapper torch: nn.DataParallel knows no CPU devices: use --wrapper handwritten")
    torch.set_num_threads(config.threads or usable_cores())
    set_arithmetic(devices[0], config.tf32, config.deterministic, config.cudnn_benchmark)
    if devices[0].type == "cuda":
        torch.cuda.set_device(devices[0])
    with stop_signals(), rank_logging(DistEnv.alone(devices[0])), device_errors(devices[0], config.less_memory):
        train(config, devices)


def train(config: DataParallelConfig, devices: tuple[torch.device, ...]) -> None:
    """The whole run, from an empty directory to the figures."""
    require_samples_for_all(config, len(devices))
    if config.download:
        fashion_mnist.download(Path(config.data_dir))
    data = load_dataset(config)
    require_a_batch(config, data, len(devices))
    with prepare(config.run_dir, overwrite=config.overwrite, resumable=False):
        named = ", ".join(map(str, devices))
        run = {"config": config.as_json(), "devices": named, "dataset_fingerprint": data.fingerprint}
        job = build_job(config, devices, data)
        with job.env.fail_together():  # a full disk is one line
            write_json(config.run_dir / CONFIG_FILE, {**run, "machine": describe_machine()})
            add_log_file(job.env, config.run_dir / LOG_FOLDER)
        logger.info(f"{config.model} on {config.dataset}: {config.batch_size} samples on {named}, {config.precision}")

        test_images = kept_on_device(data.test, devices[0])
        steps = config.epochs * job.steps_per_epoch
        metrics = MetricsWriter(config.run_dir, remedy="start again with --overwrite")
        with metrics as job.metrics, Progress(job.env, "train", steps) as job.progress:
            for epoch in range(config.epochs):
                totals = train_epoch(job, epoch)
                # The plain module, on the first device, has the weights and the statistics, and needs no replicas.
                batch_size = evaluation_batch_size(data.shape, job.env.device)
                in_order = fetch_batches(test_images, np.arange(len(test_images)), batch_size)
                result = evaluate(job.network, data, job.env, config.precision, in_order)
                job.metrics.write("epoch", job.step, epoch=epoch, **epoch_record(totals, result))
                logger.info(epoch_line(epoch + 1, config.epochs, totals, result))

        require_lock(config.run_dir)
        save(config.run_dir / MODEL_FILE, job.network)
        from common.reporting.report import finish  # and matplotlib with it

        title = f"{config.model} on {config.dataset}, one process on {named}, {config.precision}"
        with job.env.fail_together():
            shown = samples_shown(data, job.env.device)
            predictions = predict(job.network, data, job.env, shown.images)
            print_results(finish(config.run_dir, title, data, shown, predictions, result, config.epochs))


@dataclass
class DataParallelJob:
    """The parts of a training job.

    :param images: of the training set, on the first device if that is a GPU with room for them
    :param network: the plain module, on the first device
    :param model: the same, wrapped
    """

    config: DataParallelConfig
    env: DistEnv
    devices: tuple[torch.device, ...]
    data: ImageData
    images: Images
    network: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    window: Window
    step: int = 0  # optimizer steps done, over all epochs
    metrics: MetricsWriter = MetricsWriter(Path(), silent=True)
    progress: Progress | None = None

    @property
    def steps_per_epoch(self) -> int:
        return len(self.data.train) // self.config.batch_size


def build_job(config: DataParallelConfig, devices: tuple[torch.device, ...], data: ImageData) -> DataParallelJob:
    """Model and optimizer, both on the first device."""
    torch.manual_seed(derive_seed(config.seed, "weights"))
    network = build_model(config.model, data.shape, len(data.classes), config.dropout)
    network = to_device(network, devices[0], config.memory_format)
    wrap = nn.DataParallel if config.wrapper == "torch" else HandwrittenDataParallel
    model = wrap(network, list(devices))
    optimizer = build_optimizer(
        config.optimizer, network.parameters(), momentum=config.momentum, weight_decay=config.weight_decay
    )
    scaler = torch.amp.GradScaler(devices[0].type, enabled=config.precision == "fp16")
    env = DistEnv.alone(devices[0])
    images = kept_on_device(data.train, devices[0])
    return DataParallelJob(config, env, devices, data, images, network, model, optimizer, scaler, Window(devices[0]))


def train_epoch(job: DataParallelJob, epoch: int) -> WindowTotals:
    """One pass over the training set; every ``log_every`` steps, record loss and throughput."""
    config, record = job.config, functools.partial(job.metrics.write, epoch=epoch)
    order = shuffled(len(job.data.train), config.seed, epoch)  # the tail that fills no batch is left out
    stream = job.window.timed(fetch_batches(job.images, order, config.batch_size, epoch))
    job.model.train()
    windows = []
    for remaining in reversed(range(job.steps_per_epoch)):
        train_step(job, stream)
        if job.step % config.log_every == 0 or remaining == 0:
            windows.append(end_window(job.window, job.env, job.step, job.optimizer, job.scaler, record, job.progress))
    return WindowTotals.merge(windows)


def train_step(job: DataParallelJob, batches: Iterator[Batch]) -> None:
    """One optimizer step on one global batch, which is here a single forward and backward pass."""
    config, device, scaler = job.config, job.env.device, job.scaler
    images, labels = next(batches)
    images, labels = images.to(device), labels.to(device)
    for number, own in enumerate(job.devices if device.type == "cuda" else job.devices[:1]):
        seed_torch(own, config.seed, "dropout", job.step, 0, number)  # as the rank of this number in ddp.train

    with autocast(device, config.precision):
        # Scattered from the first device, computed on all, and gathered on the first, which alone computes the loss.
        logits = job.model(job.data.to_input(images, config.memory_format))
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
    scaler.scale(loss).backward()
    job.window.add(loss, logits, labels)

    scaler.unscale_(job.optimizer)  # before the clip: the norm of scaled gradients means nothing
    if config.clip_norm is not None:
        clip_grad_norm_(job.network.parameters(), config.clip_norm)
    set_learning_rate(job.optimizer, config.learning_rates(job.steps_per_epoch)(job.step))
    scaler.step(job.optimizer)
    scaler.update()
    job.optimizer.zero_grad(set_to_none=True)
    job.step += 1


def require_samples_for_all(config: DataParallelConfig, devices: int) -> None:
    """:raises UsageError: when the batch does not divide over the devices, or into too few samples for BatchNorm"""
    if config.batch_size % devices:
        raise UsageError(
            f"--batch-size {config.batch_size} does not divide over {devices} devices: use a multiple of {devices}"
        )
    if config.batch_size // devices < LEAST_SAMPLES.get(config.model, 1):
        raise UsageError(f"{config.model} cannot normalize a single sample on a device: use a larger --batch-size")


def save(path: Path, network: nn.Module) -> None:
    """Write the weights atomically: the plain module's, so that no key begins with ``module.``, and as CPU tensors.

    :raises UsageError: when they cannot be written
    """
    encoded = io.BytesIO()  # in memory first: torch.save would bury a full disk's error in one of its own
    torch.save({name: value.cpu() for name, value in network.state_dict().items()}, encoded)
    with writing(path, "start again"):
        write_bytes(path, encoded.getbuffer())


if __name__ == "__main__":
    main()
