"""torch's DDP and the one by hand train to the same weights, on this device and over this backend.

    torchrun --nproc_per_node=2 -m ddp.gpu_check.equivalence
    torchrun --nproc_per_node=2 -m ddp.gpu_check.equivalence --device cuda --backend gloo    # ranks that share a GPU

Both train a ResNet-18 in double precision and channels_last from the same weights on the same images, three steps of two
micro-steps each, the first under ``no_sync``. In double precision, rounding is far below what a wrong average
would change. On the CPU, two
ranks come to the same bits. A GPU's kernels may add in another order each time.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from common.cli import command, option, parse
from common.distributed.process_group import BACKENDS, DEVICES, DistEnv, process_group
from common.distributed.rank_logging import rank_logging
from common.files.run_directory import prepare_output, results_in
from common.reporting.turns import write_results
from common.training.models import build_model, to_device
from ddp.strategies import Averaging
from ddp.train import wrap_network

TOLERANCE = 1e-9  # of the largest magnitude of a tensor, or of 1
STEPS, MICRO_STEPS = 3, 2
IMAGES, SHAPE, CLASSES = 4, (3, 64, 64), 10  # of a rank's micro-batch


@dataclass(frozen=True)
class EquivalenceConfig:
    """Settings of ``ddp.gpu_check.equivalence``."""

    device: str = option("auto", "as in ddp.train", choices=DEVICES)
    backend: str = option("auto", "as in ddp.train", choices=BACKENDS)
    interface: str | None = option(None, "as in ddp.train", per_node=True)
    output: Path = option(Path("runs/gpu-check-equivalence"), "folder of the JSON", per_node=True)


@command
def main() -> None:
    config = parse(EquivalenceConfig, "ddp.gpu_check.equivalence", __doc__)
    with process_group(config.device, config.backend, settings=config) as env, rank_logging(env):
        with env.fail_together():
            prepare_output(config.output)
        by_torch, by_hand = (train(env, strategy) for strategy in ("torch", "handwritten"))
        found = torch.tensor(largest_difference(by_hand, by_torch), dtype=torch.float64)
        difference = float(env.sum_over_ranks(found.to(env.device)))  # of all ranks: none may differ
        if env.is_main:
            with results_in(config.output):
                where = f"{env.world_size} ranks, {env.backend} on {env.device.type}"
                facts = {"config": {**asdict(config), "output": str(config.output)}, "where": where}
                write_results(config.output / "equivalence.json", {**facts, "difference": difference})
                print(
                    f"{where}: after {STEPS} steps the weights differ by {difference:.1e}, at most {TOLERANCE:g} is right"
                )
    sys.exit(int(not difference <= TOLERANCE))  # nan is wrong, too


def train(env: DistEnv, strategy: str) -> dict[str, Tensor]:
    """The weights and buffers after some steps with one of the two, on the CPU."""
    torch.manual_seed(0)
    network = to_device(build_model("resnet18", SHAPE, CLASSES).double(), env.device, torch.channels_last)
    model: Any = wrap_network(network, env, Averaging(strategy))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    draws = torch.Generator().manual_seed(1 + env.rank)
    for _ in range(STEPS):
        for micro_step in range(MICRO_STEPS):
            images = torch.randn(IMAGES, *SHAPE, generator=draws, dtype=torch.float64).to(env.device)
            labels = torch.randint(CLASSES, (IMAGES,), generator=draws).to(env.device)
            with contextlib.nullcontext() if micro_step == MICRO_STEPS - 1 else model.no_sync():
                logits = model(images.to(memory_format=torch.channels_last))
                (F.cross_entropy(logits, labels) / MICRO_STEPS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: value.detach().cpu().clone() for name, value in network.state_dict().items()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of two values, in units of the tensor's largest magnitude where that is above 1."""
    differences = []
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        differences.append(float((found[name] - value).abs().max()) / scale)
    return float(torch.tensor(differences, dtype=torch.float64).max())  # Python's max could lose a nan


if __name__ == "__main__":
    main()
