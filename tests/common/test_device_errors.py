"""common/device_errors.py: memory that ran out, as one line that says what took it and what to lower."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from common.device_errors import device_errors
from common.errors import UsageError
from common.training.recipes import LearningConfig
from dataparallel.train import DataParallelConfig
from ddp.config import TrainConfig
from tests.support.launch import error_lines, run_torchrun

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GB = 10**9
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1 GiB is free."
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """80 GB, of which tensors took 60; 10 are in pieces, and 9 are another process's."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    answers = {
        "mem_get_info": (1 * GB, 80 * GB), "memory_allocated": 60 * GB, "memory_reserved": 70 * GB,
        "get_device_name": "NVIDIA H100",
    }  # fmt: skip
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=answer) for name, answer in answers.items()}):
        yield


def line_for(error: Exception, device: torch.device) -> str:
    """The message about it, without the place."""
    with pytest.raises(UsageError) as caught, device_errors(device, ["less", "fewer"]):
        raise error
    assert caught.value.__cause__ is error
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return re.sub(r" in line_for \(common/test_device_errors.py:\d+\)", "", message)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (torch.OutOfMemoryError(OF_CUDA), "out of memory, which asked for 2.00 GiB; NVIDIA H100 has 80.0 GB, of which"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), "out of memory; NVIDIA H100"),
        (torch.OutOfMemoryError("out of memory: the unit h.0 needs 9 bytes"), "out of memory: the unit h.0 needs 9 bytes; NV"),
    ],
)  # fmt: skip
def test_a_gpu_says_what_took_its_memory(error: Exception, begins: str) -> None:
    """Out of memory is one line that says what took the memory of the GPU.

    Claim (ddp/resilience/README.md): memory that runs out is one line.
    """
    message = line_for(error, GPU)
    assert message.startswith(begins)
    assert "tensors took 60.0 GB, 0.0 GB of them for weights and gradients" in message
    assert "9.0 GB are not this process's tensors" in message
    assert "10.0 GB are free, in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True joins them" in message
    assert message.endswith(": try less or fewer")


def test_a_host_s_memory_is_not_the_gpu_s() -> None:
    text = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000 bytes. Error code 12"
    expected = "out of memory, which asked for 4000 bytes: try less or fewer"
    assert line_for(RuntimeError(text), GPU) == line_for(RuntimeError(text), CPU) == expected
    assert line_for(MemoryError("Unable to allocate 7 PiB for an array"), GPU) == "out of memory: try less or fewer"


def test_an_operation_without_a_deterministic_algorithm_is_named() -> None:
    error = RuntimeError(
        "nll_loss2d_forward_out_cuda_template does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off ..."
    )
    assert line_for(error, GPU) == (
        "--deterministic: nll_loss2d_forward_out_cuda_template has no deterministic algorithm on cuda: leave the flag out"
    )


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("out of memory of what was said")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, device_errors(CPU, []):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (TrainConfig(), "more than --grad-accumulation-steps 1, less than --batch-size 144, --precision bf16, --strategy fsdp2"),
        (TrainConfig(strategy="zero3", precision="bf16"), "more than --grad-accumulation-steps 1, less than --batch-size 144"),
        (DataParallelConfig(), "less than --batch-size 144, --precision bf16"),
    ],
)  # fmt: skip
def test_the_advice_leaves_out_what_is_done(config: LearningConfig, flags: str) -> None:
    assert ", ".join(config.less_memory).startswith(flags)


class Enormous(nn.Module):
    """Asks for a petabyte, in training."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(classes))

    def forward(self, images: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            torch.empty(10**15)
        return self.weight.expand(len(images), -1)


def build(shape: tuple[int, int, int], classes: int) -> nn.Module:
    return Enormous(classes)


@pytest.mark.slow
def test_two_ranks_without_memory_say_so_once(tmp_path: Path) -> None:
    """Two ranks without memory say so once.

    Claim (ddp/resilience/README.md): two ranks that run out of memory say so once.
    """
    model = f"{__name__}:build"
    done = run_torchrun(2, "ddp.train", "--model", model, "--train-samples", "200", "--run-dir", str(tmp_path / "run"))
    (line,) = error_lines(done.stderr)
    assert line.startswith("error: out of memory in forward (common/test_device_errors.py:")
    assert (
        "asked for 4000000000000000 bytes: try more than --grad-accumulation-steps 1 or less than --batch-size" in line
    )
    assert not (tmp_path / "run" / "config.json").exists()  # the next start finds no run
