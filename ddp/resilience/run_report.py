"""What ``ddp.train`` says of a run beyond what every trainer does: how it was started, and how it could load faster."""

from __future__ import annotations

from typing import Any

from torch import nn

from common.data.datasets import ImageData
from common.distributed.process_group import DistEnv
from common.reporting.machine import describe_machine
from common.training.evaluation import Evaluation
from ddp.config import FROM_FILES, TrainConfig


def faster_loading(config: TrainConfig) -> list[str]:
    """The flags that may bring batches sooner: more workers and, for images in files, what decodes them faster."""
    workers = "--workers 2" if config.workers == 0 else f"more than --workers {config.workers}"
    flags = {"--loader fast": config.loader == "stock", "--decoder simplejpeg": config.decoder == "pillow"}
    return [workers, *(flag for flag, helps in flags.items() if helps and config.dataset in FROM_FILES)]


def describe_run(config: TrainConfig, env: DistEnv, data: ImageData) -> dict[str, Any]:
    """What ``config.json`` says of the run."""
    return {
        "config": config.as_json(),
        "world_size": env.world_size,
        "backend": env.backend,
        "device": str(env.device),
        "dataset_fingerprint": data.fingerprint,
        "machine": describe_machine(),
    }


def report_run(config: TrainConfig, env: DistEnv, network: nn.Module, data: ImageData, result: Evaluation) -> None:
    """Draw the figures and print the summary of a complete run, on rank 0. The other ranks wait for it."""
    with env.fail_together():
        if env.is_main:
            from common.reporting.report import finish  # and matplotlib with it

            title = f"{config.model} on {config.dataset}, {env.world_size} ranks, {config.precision}"
            print(finish(config.run_dir, title, network, data, env, result, faster_loading(config)), flush=True)
