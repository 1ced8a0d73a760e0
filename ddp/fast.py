"""``--fast``: the strategy, the all-reduce and the precision that are the fastest here and still right.

    torchrun --nproc_per_node=2 -m ddp.train --fast

- On a CPU whose ranks are all on one host, the DDP by hand sums gradients in shared memory: nothing is sent.
- bf16 where the devices have instructions for it.

A setting that is given by its own flag stays. A run that is continued keeps what was chosen when it began.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import torch.distributed as dist

from common.distributed.process_group import DistEnv
from common.errors import UsageError
from common.files.run_directory import read_config
from common.training.precision import multiplies_bf16
from ddp.config import TrainConfig
from ddp.resilience.resume import agents_of, how_it_begins
from ddp.strategies import STAGES

logger = logging.getLogger("ddp.train")

AS_BEFORE = "as the run began"


def choose_fastest(config: TrainConfig, env: DistEnv) -> TrainConfig:
    """Fill in the settings that ``--fast`` leaves open, and log why. A collective.

    :raises UsageError: on every rank, if the settings contradict each other, or if a run that goes on computes in bf16, for
        which a rank's device has no instructions
    """
    agents = agents_of(env)
    before = env.from_rank_0(lambda: _recorded(config, agents))
    devices: list[str | None] = [None] * env.world_size
    dist.all_gather_object(devices, None if multiplies_bf16(env.device) else f"the {env.device.type} of {env.host}")
    with env.fail_together():
        strategy, all_reduce, why = _averaging(config, env, before)
        precision, why_precision = _precision(config, next(filter(None, devices), None), before)
        chosen = dataclasses.replace(config, strategy=strategy, all_reduce=all_reduce, precision=precision)
    summed = f" --all-reduce {chosen.all_reduce}" if chosen.all_reduce else ""
    logger.info(f"--fast: --strategy {strategy}{summed}, {why}; --precision {precision}, {why_precision}")
    return chosen


def _recorded(config: TrainConfig, agents: list[str]) -> dict[str, Any]:
    """The settings of the run that this start continues, if ``--fast`` chose them; else none."""
    before: dict[str, Any] = read_config(config.run_dir).get("config", {}) if how_it_begins(config, agents)[0] else {}
    return before if before.get("fast") else {}


def _averaging(config: TrainConfig, env: DistEnv, before: dict[str, Any]) -> tuple[str, Any, str]:
    """``strategy``, ``all_reduce`` and the reason."""
    if config.strategy is None and config.all_reduce is None and before:
        return before["strategy"], before["all_reduce"], AS_BEFORE
    strategy = config.strategy or "handwritten"
    if config.all_reduce is not None or strategy not in ("handwritten", *STAGES):
        return strategy, config.all_reduce, "as given"
    if env.device.type != "cpu":
        obstacle = "since the backend sums the gradients of GPUs"
    elif env.local_world_size < env.world_size:
        obstacle = "since the ranks are on several hosts, which share no memory"
    elif sys.platform != "linux":
        obstacle = "since shared memory needs Linux"
    elif config.gradient_precision != "fp32":
        obstacle = f"since the backend sums gradients in {config.gradient_precision}"
    else:
        return strategy, "shared-memory", "since all ranks are on this host"
    return config.strategy or "torch", None, obstacle


def _precision(config: TrainConfig, lacking: str | None, before: dict[str, Any]) -> tuple[str, str]:
    """``precision`` and the reason.

    :param lacking: a device without instructions for bf16; None if all have them
    :raises UsageError: see :func:`choose_fastest`
    """
    if config.precision is not None:
        return config.precision, "as given"
    if lacking and before.get("precision") == "bf16":
        raise UsageError(
            f"--fast: the run began with --precision bf16, for which {lacking} has no instructions: give --precision fp32, or "
            "bf16 to go on slowly"
        )
    if before:
        return before["precision"], AS_BEFORE
    if lacking:
        return "fp32", f"since {lacking} has no instructions for bf16"
    return "bf16", "since the devices have instructions for it"
