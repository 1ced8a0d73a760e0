"""The same training by ``ddp.train``, and by other libraries as in their documentation.

Theirs fetch a sample at a time, in the main process.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from common.data.datasets import ImageData
from common.distributed.dist_env import DistEnv
from common.models.build import build_model
from ddp.bench.overhead import endless_batches, trainer_step
from ddp.config import TrainConfig
from ddp.ladder.rungs import BATCH_SIZE, LEARNING_RATE, OneByOne, Training
from ddp.resilience import complete_settings
from ddp.train import build_job


class OurTraining(Training):
    """``ddp.train``, with the recipe of the rungs.

    :param settings: of :class:`ddp.config.TrainConfig`
    """

    def __init__(self, env: DistEnv, settings: dict[str, Any], data: ImageData) -> None:
        super().__init__(env, data)
        recipe: dict[str, Any] = {"optimizer": "adam", "lr": LEARNING_RATE, "schedule": "constant"}
        config = TrainConfig(batch_size=BATCH_SIZE, warmup_epochs=0, **recipe, **settings)
        job = build_job(complete_settings(config, env), env, data)
        self._network, self._step = job.network, trainer_step(job, self._timed(endless_batches(job)))


class OtherTraining(Training):
    """A network, an optimizer and a loader, which other libraries are given."""

    def __init__(self, env: DistEnv, _: object, data: ImageData) -> None:
        super().__init__(env, data)
        torch.manual_seed(0)
        self._network = build_model("fashion-cnn", data.shape, len(data.classes))
        self._loader = DataLoader(OneByOne(data), BATCH_SIZE // env.world_size, shuffle=True)
        self._optimizer = torch.optim.Adam(self._network.parameters(), lr=LEARNING_RATE)


class AccelerateTraining(OtherTraining):
    """As Accelerate's quick tour."""

    def __init__(self, env: DistEnv, settings: object, data: ImageData) -> None:
        super().__init__(env, settings, data)
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, adam, loader = accelerator.prepare(self._network, self._optimizer, self._loader)
        batches = self._timed(itertools.chain.from_iterable(itertools.repeat(loader)))

        def step() -> None:
            images, labels = next(batches)
            adam.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            adam.step()

        self._step = step


class LightningTraining(OtherTraining):
    """As "Lightning in 15 minutes", without its logs, checkpoints and progress bar."""

    def __init__(self, env: DistEnv, settings: object, data: ImageData) -> None:
        super().__init__(env, settings, data)
        from lightning import LightningModule

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        training = self

        class Classifier(LightningModule):  # type: ignore[misc]
            def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
                images, labels = batch
                return F.cross_entropy(self.network(images), labels)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return training._optimizer

            def on_train_start(self) -> None:
                training._setup = time.perf_counter() - training._began

        self._classifier, self._generator = Classifier(), torch.Generator()
        self._classifier.network = self._network

    def _take(self, steps: int) -> None:
        from lightning import Trainer

        # Each turn is a run of its own. Lightning's own sampler would begin each with the same samples.
        quiet = dict.fromkeys(
            (
                "logger",
                "enable_checkpointing",
                "enable_progress_bar",
                "enable_model_summary",
                "use_distributed_sampler",
            ),
            False,
        )
        ranks = self._env.world_size
        order = torch.randperm(len(self._data.train), generator=self._generator)[self._env.rank :: ranks]
        loader = DataLoader(self._loader.dataset, BATCH_SIZE // ranks, sampler=order.tolist())
        trainer = Trainer(accelerator="cpu", devices=ranks, strategy="ddp", max_steps=steps, max_epochs=-1, **quiet)
        self._began = time.perf_counter()
        trainer.fit(self._classifier, self._timed(loader))
