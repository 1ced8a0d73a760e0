"""``ddp.train`` itself, beside the rungs and with their recipe."""

from __future__ import annotations

from typing import Any

from common.data.datasets import ImageData
from common.distributed.process_group import DistEnv
from ddp.bench.overhead import endless_batches, trainer_step
from ddp.config import TrainConfig
from ddp.fast import choose_fastest
from ddp.ladder.rungs import BATCH_SIZE, LEARNING_RATE, Training
from ddp.train import build_job


class OurTraining(Training):
    """``ddp.train``, with the recipe of the rungs.

    :param settings: of :class:`ddp.config.TrainConfig`
    """

    def __init__(self, env: DistEnv, settings: dict[str, Any], data: ImageData) -> None:
        super().__init__(env, data)
        recipe: dict[str, Any] = {"optimizer": "adam", "lr": LEARNING_RATE, "schedule": "constant"}
        config = TrainConfig(batch_size=BATCH_SIZE, warmup_epochs=0, **recipe, **settings)
        job = build_job(choose_fastest(config, env) if config.fast else config, env, data)
        self._network, self._step = job.network, trainer_step(job, self._timed(endless_batches(job)))
