"""In a step on a GPU (ddp/resilience/device_guard.py), and in an evaluation, the host reads nothing from it.

torch's fake tensors stand for a GPU that is not there: they have its device and their shape, and no values. An operation that
would read a value raises, and so would the host have waited. A whole step of ``ddp.train`` runs on them, but for the backward
pass, which torch does not fake.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.data.datasets import Batch, fetch_batches
from common.distributed.dist_env import DistEnv
from common.models.build import build_model
from common.training.evaluation import evaluate
from ddp.data import load_data
from ddp.rendezvous.process_group import process_group
from ddp.resilience.device_guard import DeviceGuard
from ddp.resilience.guard import ResilientGuard
from ddp.train import build_job, train_step
from tests.ddp.jobs import small
from tests.support.launch import run_ranks

GPU = torch.device("cuda", 0)


class NoCopyToHost(TorchDispatchMode):
    """Refuses a copy to the host for which the host waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[1].device == GPU and args[0].device.type == "cpu":
            assert args[2], "a copy that is not non_blocking"
        if func is torch.ops.aten._to_copy.default and args[0].device == GPU:
            assert result.device == GPU, "a copy to the host"
        return result


class Alone(nn.Module):
    """Stands for DDP, which knows nothing of fake tensors; and for the backward pass, after which gradients are there."""

    def __init__(self, module: nn.Module, *_: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        """The module's own."""

        def backward(loss: Tensor) -> None:
            assert loss.device == GPU
            for parameter in self.parameters():
                parameter.grad = torch.zeros_like(parameter)

        Tensor.backward = backward  # type: ignore[assignment, method-assign]
        return self.module(*inputs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """There are no other ranks to synchronize with."""
        return contextlib.nullcontext()


def build_on_gpu(*arguments: Any) -> nn.Module:
    """The network, built there: fake parameters cannot be moved."""
    with GPU:
        network = build_model(*arguments)
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(GPU))
    return network


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """CUDA tensors without a GPU."""
    of_cuda = ("cuda.Event", "cuda.manual_seed", "cuda.device", "cuda.reset_peak_memory_stats", "_fused_sgd_")
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # autocast says that it does nothing without a GPU
        for name in (*of_cuda, "Tensor.backward"):
            stack.enter_context(mock.patch(f"torch.{name}"))
        stack.enter_context(mock.patch("torch.cuda.mem_get_info", return_value=(0, 0)))  # no data are kept on it
        stack.enter_context(mock.patch("torch.cuda.synchronize", side_effect=AssertionError("waits for the device")))
        stack.enter_context(mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        stack.enter_context(mock.patch("torch.Tensor.pin_memory", lambda tensor: tensor))
        stack.enter_context(mock.patch("ddp.network.build_model", build_on_gpu))
        stack.enter_context(mock.patch("ddp.network.to_device", lambda network, *_: network))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(NoCopyToHost())  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """There is no group: the sum over the ranks is this rank's own, and no other rank can differ."""
    with mock.patch("torch.distributed.all_reduce"), mock.patch("ddp.network.require_same_modules"):
        yield


def step_on(guard: type[ResilientGuard], **settings: Any) -> None:
    """Take the first step of a job on the fake GPU."""
    env = DistEnv.alone(GPU)
    config = small(train_samples=40, test_samples=20, batch_size=20, grad_accumulation_steps=2, **settings)
    data = load_data(config, env)
    on_host = list(fetch_batches(data.train, np.arange(20), 10))
    with fake_gpu(), mock.patch("ddp.train.build_guard", guard), mock.patch("ddp.train.wrap_network", Alone), alone():
        job = build_job(config, env, data)
        train_step(job, job.guard.batches(on_host))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_reads_nothing(precision: str, clip_norm: float | None, optimizer: str) -> None:
    """On a (fake) GPU, a training step reads nothing from the device.

    Claim (ddp/resilience/README.md): on a GPU, a step reads nothing from the device.
    """
    settings: dict[str, Any] = {"precision": precision, "clip_norm": clip_norm, "optimizer": optimizer}
    step_on(DeviceGuard, **settings)
    with pytest.raises(DataDependentOutputException):  # the guard for CPUs does, and this test finds it
        step_on(ResilientGuard, **settings)


def test_an_evaluation_reads_nothing_before_its_last_batch() -> None:
    data = load_data(small(train_samples=40, test_samples=20, batch_size=20), DistEnv.alone(torch.device("cpu")))
    taken: list[Batch] = []

    def batches() -> Iterator[Batch]:
        for batch in on_host:
            yield batch
            taken.append(batch)

    on_host = list(fetch_batches(data.test, np.arange(20), 8))
    with fake_gpu(), torch.no_grad():
        network = build_on_gpu("fashion-cnn", data.shape, len(data.classes))
        of_fake_tensors = inspect.unwrap(evaluate)  # which torch cannot run in inference mode
        with pytest.raises(DataDependentOutputException):  # when all are summed, the loss is read
            of_fake_tensors(network, data, DistEnv.alone(GPU), "bf16", batches())
    assert len(taken) == len(on_host) == 3


def steps_in_which_waiting_is_an_error(precision: str) -> int:
    with process_group() as env:
        config = small(precision=precision, clip_norm=1.0, grad_accumulation_steps=2)
        job = build_job(config, env, load_data(config, env))
        job.sampler.set_epoch(0)
        batches = job.guard.batches(job.loader)
        for _ in range(3):
            train_step(job, batches)
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            train_step(job, batches)
        torch.cuda.set_sync_debug_mode("default")
        return job.step


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_real_gpu_no_operation_of_a_step_waits(precision: str) -> None:
    assert run_ranks(steps_in_which_waiting_is_an_error, 1, precision, fresh=True) == [6]
