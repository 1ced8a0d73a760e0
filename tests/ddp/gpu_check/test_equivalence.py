"""``python -m ddp.gpu_check.equivalence``: equal weights are found equal, and a wrapper that averages wrongly is found."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from common.distributed.process_group import process_group
from ddp.gpu_check import equivalence
from ddp.gpu_check.equivalence import TOLERANCE, largest_difference, train
from ddp.strategies import Averaging
from tests.support.launch import run_command, run_ranks


class Broken(nn.Module):
    """It never averages."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def no_sync(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module(images)
        return logits


def differences() -> tuple[float, float]:
    """Of the DDP by hand from torch's, and of a broken one; on smaller images."""
    with process_group("cpu", threads=1) as env, mock.patch.multiple(equivalence, STEPS=2, IMAGES=2, SHAPE=(3, 32, 32)):
        by_torch, by_hand = train(env, "torch"), train(env, "handwritten")

        def wrap(module: nn.Module, env: object, averaging: Averaging) -> nn.Module:
            return Broken(module)

        with mock.patch.object(equivalence, "wrap_network", wrap):
            broken = train(env, "handwritten")
        return largest_difference(by_hand, by_torch), largest_difference(broken, by_torch)


@pytest.mark.slow
def test_the_ddp_by_hand_gives_torchs_weights_and_a_broken_one_does_not() -> None:
    for equal, broken in run_ranks(differences, 2):
        assert equal == 0
        assert broken > 1e6 * TOLERANCE


@pytest.mark.gpu
def test_on_a_gpu_over_nccl_and_shared_over_gloo() -> None:
    """The check of equivalence passes on one rank over NCCL and on two that share a GPU over gloo."""
    for ranks, backend in ((1, "nccl"), (2, "gloo")):
        flags = ("torch.distributed.run", f"--nproc_per_node={ranks}", "-m", "ddp.gpu_check.equivalence")
        done = run_command(*flags, "--device", "cuda", "--backend", backend, timeout_s=280)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_difference_is_relative_to_a_large_tensor_and_nan_is_one() -> None:
    expected = {"weight": torch.tensor([100.0, 1.0]), "bias": torch.tensor([0.5]), "count": torch.tensor(3)}
    assert largest_difference(expected, expected) == 0
    assert largest_difference(expected | {"weight": torch.tensor([100.0, 2.0])}, expected) == pytest.approx(0.01)
    assert largest_difference(expected | {"bias": torch.tensor([0.25])}, expected) == pytest.approx(0.25)
    assert not largest_difference(expected | {"bias": torch.tensor([float("nan")])}, expected) <= TOLERANCE
