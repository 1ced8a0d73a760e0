"""On GPUs over NCCL, the replicas and the shards written by hand come to the weights of torch's DDP."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.models.build import build_model
from common.models.modules import to_device
from ddp.by_hand import HandwrittenDistributedDataParallel
from ddp.rendezvous import process_group
from ddp.sharded import shard
from ddp.strategies import STAGES
from tests.support.launch import run_ranks

TOLERANCE = 1e-9  # of the weights, in double precision: rounding is far below what a wrong average would change
STEPS, MICRO_STEPS = 3, 2
IMAGES, SHAPE, CLASSES = 4, (3, 64, 64), 10  # of a rank's micro-batch


def trained(strategy: str | int) -> dict[str, Tensor]:
    """The weights after some steps of a ResNet-18, on the CPU.

    :param strategy: ``"torch"``, ``"by hand"``, or a stage of sharding
    """
    with process_group("cuda", "nccl") as env:
        torch.manual_seed(0)
        network = to_device(build_model("resnet18", SHAPE, CLASSES).double(), env.device, torch.channels_last)
        model: Any
        if strategy == "torch":
            model = DistributedDataParallel(network, device_ids=[env.device])
        elif strategy == "by hand":
            model = HandwrittenDistributedDataParallel(network)
        else:
            model = shard(network, int(strategy))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        draws = torch.Generator().manual_seed(1 + env.rank)
        for _ in range(STEPS):
            for micro_step in range(MICRO_STEPS):
                images = torch.randn(IMAGES, *SHAPE, generator=draws, dtype=torch.float64).to(env.device)
                labels = torch.randint(CLASSES, (IMAGES,), generator=draws).to(env.device)
                with contextlib.nullcontext() if micro_step == MICRO_STEPS - 1 else model.no_sync():
                    logits = model(images.to(memory_format=torch.channels_last))
                    (F.cross_entropy(logits, labels) / MICRO_STEPS).backward()
            optimizer.step()
            optimizer.zero_grad()
        with model.gathered() if strategy in STAGES.values() else contextlib.nullcontext():
            return {name: weight.detach().cpu() for name, weight in network.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["by hand", *STAGES.values()])
def test_a_rank_on_each_gpu_comes_to_torchs_weights(strategy: str | int) -> None:
    """With a rank on each GPU, over NCCL, the DDP by hand and the stages of sharding come to torch's weights."""
    ranks = torch.cuda.device_count()
    expected, *_ = run_ranks(trained, ranks, "torch", fresh=True)
    for found in run_ranks(trained, ranks, strategy, fresh=True):
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
