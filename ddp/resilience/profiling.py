"""Traces of a few training steps, for https://ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.distributed.dist_env import DistEnv

logger = logging.getLogger(__name__)

# Steps without the profiler, with it but unrecorded, and recorded. On a GPU, torch's DDP makes the host wait in its first ten
# forward passes, to time them for its logging data (Reducer::should_collect_runtime_stats).
WAIT, WARMUP, ACTIVE = 8, 2, 4


@contextlib.contextmanager
def profile_steps(env: DistEnv, folder: Path) -> Iterator[Callable[[], None]]:
    """Record steps 11 to 14 of the block on every rank, as ``rank<r>.json.gz`` in ``folder``.

    Torch names the parts of a step: ``DistributedDataParallel.forward``, ``autograd::engine::evaluate_function``,
    ``gloo:all_reduce``, ``Optimizer.step``.

    :param env: names the rank and its device
    :param folder: folder of the traces
    :returns: a function to call at the end of each step
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{env.rank}.json.gz"

    def export(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(path))
        logger.info("profile: open %s in https://ui.perfetto.dev", path)

    if env.device.type == "cpu":
        # Kineto calls it an error that there is no GPU, on stderr. It reads this once; 6 is above all its levels.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (env.device.type == "cuda")
    steps = schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1)
    with profile(activities=activities, schedule=steps, on_trace_ready=export) as profiler:
        yield profiler.step
    if not path.exists():
        logger.warning("profile: no trace, the run ended before its step %d", WAIT + WARMUP + 1)
