"""``--fast``: of shared memory and bf16, take what this machine has.

    torchrun --nproc_per_node=2 -m ddp.train --fast

- On a CPU whose ranks are all on one node, the DDP by hand sums gradients in shared memory: nothing is sent.
- bf16 where the devices have instructions for it.

A setting that is given by its own flag stays. A run that is continued keeps what was chosen when it began, if it still can.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import torch.distributed as dist

from common.distributed.dist_env import DistEnv
from common.training.precision import multiplies_bf16
from ddp.config import TrainConfig
from ddp.strategies import BY_HAND

logger = logging.getLogger("ddp.train")

AS_BEFORE = "as the run began"


def choose_fastest(config: TrainConfig, env: DistEnv, before: dict[str, Any]) -> TrainConfig:
    """Fill in the settings that ``--fast`` leaves open, and log why. A collective.

    :param before: the settings of the run that this start continues, if ``--fast`` chose them; else none
    :raises UsageError: on every rank, if the settings contradict each other
    """
    devices: list[str | None] = [None] * env.world_size
    dist.all_gather_object(devices, None if multiplies_bf16(env.device) else f"the {env.device.type} of {env.host}")
    strategy, all_reduce, why = _averaging(config, env, before)
    precision, why_precision = _precision(config.precision, next(filter(None, devices), None), before)
    with env.fail_together():
        chosen = dataclasses.replace(config, strategy=strategy, all_reduce=all_reduce, precision=precision)
    summed = f" --all-reduce {chosen.all_reduce}" if chosen.all_reduce else ""
    logger.info(f"--fast: --strategy {strategy}{summed}, {why}; --precision {precision}, {why_precision}")
    return chosen


def _averaging(config: TrainConfig, env: DistEnv, before: dict[str, Any]) -> tuple[str, Any, str]:
    """``strategy``, ``all_reduce`` and the reason."""
    strategy = config.strategy or (before["strategy"] if before and not config.all_reduce else "handwritten")
    if config.all_reduce is not None or strategy not in BY_HAND:
        return strategy, config.all_reduce, "as given" if config.strategy or config.all_reduce else AS_BEFORE
    obstacle = why_no_shared_memory(env)
    if obstacle is None:
        return strategy, "shared-memory", "since all ranks are on this node"
    return (config.strategy, "backend", obstacle) if config.strategy else ("torch", None, obstacle)


def why_no_shared_memory(env: DistEnv) -> str | None:
    """Why the ranks cannot sum gradients in memory that they share; None if they can."""
    if env.device.type != "cpu":
        return "since the backend sums the gradients of GPUs"
    if env.local_world_size < env.world_size:
        return "since the ranks are on several nodes, which share no memory"
    if sys.platform != "linux":
        return "since shared memory needs Linux"
    return None


def _precision(given: str | None, lacking: str | None, before: dict[str, Any]) -> tuple[str, str]:
    """``precision`` and the reason.

    :param given: by its own flag
    :param lacking: a device without instructions for bf16; None if all have them
    """
    if given is not None:
        return given, "as given"
    if before:
        slow = f", but {lacking} has no instructions for it" if lacking and before["precision"] == "bf16" else ""
        return before["precision"], AS_BEFORE + slow
    if lacking:
        return "fp32", f"since {lacking} has no instructions for bf16"
    return "bf16", "since the devices have instructions for it"
