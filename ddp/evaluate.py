"""Exact evaluation: every test sample counts once, at every world size.

    torchrun --nproc_per_node=2 -m ddp.evaluate --run-dir runs/glyphs-fashion-cnn --checkpoint best

``DistributedSampler`` pads the last batch with repeated samples, which count twice (pytorch#25162). Here the ranks divide
the test set without padding; some may have a batch more than others, which is why the plain module is called, not its DDP
wrapper, and why the counts cross the network once, at the end.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from common.command_line.cli import command, from_settings, option, parse
from common.distributed import BACKENDS, DEVICES
from common.distributed.rank_logging import rank_logging
from common.errors import UsageError
from common.models.build import build_model
from common.training.evaluation import evaluate, table
from common.training.precision import PRECISIONS, set_arithmetic
from ddp.by_hand.replicas import broadcast, replicated
from ddp.checkpoint import storage
from ddp.checkpoint.folder import MANIFEST, Damaged
from ddp.checkpoint.storage import CHOICE, Manifest, choose
from ddp.config import FROM_FILES, LAUNCH_SETTINGS, TrainConfig
from ddp.data import load_data, open_test_loader
from ddp.rendezvous.process_group import process_group


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of ``ddp.evaluate``; the model, the data set and the way it is loaded are those of the run."""

    run_dir: Path = option(
        Path("runs/glyphs-fashion-cnn"), "directory of the run of which a checkpoint is evaluated", per_node=True
    )
    checkpoint: str | None = option(None, CHOICE)
    data_dir: str | None = option(
        None, "where the files of fashion-mnist, lfw or folder are (default: the run's)", per_node=True
    )
    test_samples: int | None = option(
        None, "test on the first so many samples (default: as many as the run did)", minimum=1
    )
    precision: str = option(
        "fp32", "of the evaluation, whatever the run was trained in; TF32 as in the run", choices=PRECISIONS
    )
    device: str = option("auto", "auto takes CUDA where there is any", choices=DEVICES)
    backend: str = option("auto", "auto takes nccl on CUDA and gloo on the CPU", choices=BACKENDS)
    interface: str | None = option(None, "as in ddp.train", per_node=True)


def settings_of_run(path: Path, manifest: Manifest) -> TrainConfig:
    """The settings of the run that wrote the checkpoint, but for its directory.

    :raises Damaged: when this version does not take them, or those are missing without which any guess would be silent
    """
    if missing := [name for name in ("model", "dataset") if name not in manifest.config]:
        raise Damaged(path, f"{MANIFEST} has settings without {', '.join(missing)}")
    settings = {name: value for name, value in manifest.config.items() if name not in LAUNCH_SETTINGS}
    try:
        return from_settings(TrainConfig, "ddp.train", settings)
    except UsageError as error:
        raise Damaged(path, f"{MANIFEST} has settings that this version does not take: {error}") from error


@command
def main() -> None:
    config = parse(EvaluateConfig, "ddp.evaluate", __doc__)
    with process_group(config.device, config.backend, settings=config) as env, rank_logging(env):
        path, manifest = env.from_rank_0(lambda: choose(config.run_dir, config.checkpoint))
        run = settings_of_run(path, manifest)
        # The training samples too: the images are normalized by their mean and standard deviation.
        run = dataclasses.replace(run, data_dir=config.data_dir or run.data_dir, download=False)
        set_arithmetic(env.device, run.tf32, run.deterministic, run.cudnn_benchmark)
        data = load_data(run, env)
        with env.fail_together():
            if problem := manifest.other_data(len(data.train), data.fingerprint):
                advice = ": give its --data-dir" if run.dataset in ("fashion-mnist", *FROM_FILES) else ""
                raise UsageError(f"{path} was trained on other data than is there now: {problem}{advice}")
        if config.test_samples not in (None, run.test_samples):
            data = load_data(dataclasses.replace(run, test_samples=config.test_samples), env)
        network = build_model(
            run.model, data.shape, len(data.classes), size=run.model_size and run.model_size._replace(on_meta=False)
        )
        with env.fail_together():
            if env.is_main:
                storage.load_weights(network, path)
        assert dist.group.WORLD is not None
        broadcast(list(replicated(network.to(env.device)).values()), 0, dist.group.WORLD)
        shard = open_test_loader(data, env, run)
        result = evaluate(network, data, env, config.precision, shard)
        if env.is_main:
            print(table(result, data.classes, data.test_unit))


if __name__ == "__main__":
    main()
