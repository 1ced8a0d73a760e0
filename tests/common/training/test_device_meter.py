"""A GPU's metrics: times by CUDA events, memory, and the share of the GPU's peak. A scripted GPU stands for one."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from common.data.datasets import Batch
from common.distributed.dist_env import DistEnv
from common.models.build import build_model
from common.models.gpt import TextModel
from common.reporting.report import gpu_line, of_gpus
from common.training.device_meter import DeviceMeter, DeviceTotals
from common.training.window import Window, end_window
from ddp.data import load_data
from ddp.job import Job
from ddp.peak_flops import peak_flops, training_flops
from ddp.rendezvous.process_group import process_group
from ddp.train import build_job
from tests.ddp.jobs import small
from tests.support.fake_gpu import TimedGPU
from tests.support.launch import run_ranks

CPU = torch.device("cpu")


def timed_gpu(patch: pytest.MonkeyPatch) -> TimedGPU:
    """A GPU that keeps the host's time, too."""
    gpu = TimedGPU(patch)
    patch.setattr(time, "perf_counter", lambda: gpu.now_ms["default"] / 1e3)
    return gpu


def of_two_ranks() -> list[DeviceTotals | None]:
    """Two windows, of two steps of two micro-steps each, of 10 ms on rank 0 and 20 ms on rank 1; and one without steps."""
    with process_group() as env, pytest.MonkeyPatch.context() as patch:
        gpu = timed_gpu(patch)
        window = Window(env.device)
        window.meter = DeviceMeter(env.device, micro_steps=2)
        window.meter.measure_mfu(flops=300, peak=10_000.0)
        totals = []
        for memory in (5_000, 3_000):
            for _ in window.timed(iter([Batch(torch.zeros(1), torch.zeros(1))] * 4)):
                gpu.now_ms["default"] += 10 * (env.rank + 1)
                gpu.peak = max(gpu.peak, memory + env.rank)
                window.end_batch()
                gpu.now_ms["default"] += 30 * (2 - env.rank)  # a checkpoint, which is no part of the step
            window.reduce(env)
            totals.append(window.on_gpu)
        gpu.now_ms["default"] += 1
        window.reduce(env)
        return [*totals, window.on_gpu]


def test_a_window_is_the_mean_over_the_ranks_and_the_most_memory_of_any() -> None:
    """A window is the mean over the ranks and the most memory of any.

    Claim (ddp/README.md): a GPU's times, memory and MFU are the means, and the most, of all ranks; FLOPs are those of
    the formulas.
    """
    for first, second, empty in run_ranks(of_two_ranks, 2):
        for totals, memory in ((first, 5_001), (second, 3_001)):
            assert totals.gpu_ms_per_step == pytest.approx((20 + 40) / 2)
            assert totals.gpu_busy == pytest.approx((40 / 280 + 80 / 200) / 2)
            assert totals.gpu_memory == memory  # of this window alone
            assert totals.mfu == pytest.approx((4 * 300 / 0.28 + 4 * 300 / 0.2) / 2 / 10_000)
        assert empty is None


def test_metrics_progress_and_summary_have_what_a_gpu_did() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    window, progress, records = Window(CPU), mock.Mock(), []
    with mock.patch.object(window, "meter") as meter:
        meter.read.return_value = DeviceTotals(12.34, 0.9, 3_500_000_000, 0.41)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        record = lambda kind, step, **values: records.append({"kind": kind, **values})  # noqa: E731
        end_window(window, DistEnv.alone(CPU), 7, optimizer, scaler, record, progress)
    assert progress.reach.call_args.args[1].endswith("images/s, 12.3 ms/step on the GPU, 41 % MFU, 3.5 GB")
    (step,) = records
    assert {name: step[name] for name in ("gpu_ms_per_step", "gpu_busy", "gpu_memory", "mfu")} == {
        "gpu_ms_per_step": 12.34, "gpu_busy": 0.9, "gpu_memory": 3_500_000_000, "mfu": 0.41,
    }  # fmt: skip
    medians = of_gpus([step, {**step, "gpu_memory": 1}, {"kind": "epoch", "gpu_busy": "forged"}])
    assert gpu_line(medians) == "GPU: 12.3 ms per step, working 90 % of the time, 41 % MFU, at most 3.5 GB of tensors\n"
    assert gpu_line(of_gpus([{"kind": "step", "loss": 1.0}])) == ""


def test_the_mfu_of_a_gpu_without_a_peak_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = timed_gpu(monkeypatch)
    meter = DeviceMeter(CPU, 1)
    meter.measure_mfu(flops=300, peak=None)
    meter.begin()
    gpu.now_ms["default"] += 1
    totals = meter.read(DistEnv.alone(CPU))
    assert totals is not None and "mfu" not in totals.as_record()


@pytest.mark.parametrize(
    ("gpu", "precision", "tf32", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", True, 989),
        ("NVIDIA H100 PCIe", "fp16", False, 756),
        ("NVIDIA A100-SXM4-80GB", "fp32", True, 156),
        ("NVIDIA A100-SXM4-80GB", "fp32", False, 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "fp32", False, None),
        ("NVIDIA L40S", "bf16", True, 362),
        ("NVIDIA A10G", "bf16", True, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", True, None),
        ("NVIDIA GH200 480GB", "bf16", True, None),
        ("Tesla T4", "fp32", True, 8.1),
    ],
)
def test_the_peak_is_found_by_name_or_not_told(gpu: str, precision: str, tf32: bool, teraflops: float | None) -> None:
    assert peak_flops(gpu, precision, tf32) == (teraflops and teraflops * 1e12)


def test_flops_are_those_of_the_formulas() -> None:
    """Flops are those of the formulas.

    Claim (ddp/README.md): a GPU's times, memory and MFU are the means, and the most, of all ranks; FLOPs are those of
    the formulas.
    """
    samples, length, width, layers = 2, 11, 128, 4
    text = TextModel(13, width, layers, length)
    weights = sum(part.weight.numel() for part in text.modules() if isinstance(part, nn.Linear))
    # torch 2.11's counter does not know attention on a CPU.
    is_known = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    attention = 3 * 4 * samples * length**2 * width * layers * is_known
    tokens = torch.zeros(samples, length, dtype=torch.long)
    assert training_flops(text, tokens) == 6 * weights * samples * length + attention
    images = build_model("resnet18", (3, 64, 64), 10)
    before = {name: value.clone() for name, value in images.state_dict().items()}
    training_flops(images, torch.randn(2, 3, 64, 64))
    assert images.training
    assert all(torch.equal(value, before[name]) for name, value in images.state_dict().items())


def flops_of(strategies: list[str]) -> list[int]:
    """The FLOPs of a job's micro-batch, as the job tells its meter."""
    with process_group(threads=1) as env:
        return [flops_with(strategy, env) for strategy in strategies]


def flops_with(strategy: str, env: DistEnv) -> int:
    config = small(model="gpt", dataset="sums", train_samples=100, test_samples=10, batch_size=20, strategy=strategy)
    job: Job = build_job(config, env, load_data(config, env))
    job.window.meter = DeviceMeter(env.device, 1)
    with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        job.measure_mfu()
    return job.window.meter._flops


def test_each_strategy_tells_the_same_flops() -> None:
    for flops in run_ranks(flops_of, 2, ["torch", "handwritten", "zero3", "fsdp2"]):
        assert flops == [flops[0]] * 4


@pytest.mark.gpu
def test_on_a_gpu_the_metrics_have_its_times_and_memory(tmp_path: Path) -> None:
    from common.training.metrics import read_metrics
    from tests.ddp.jobs import run_job

    run_ranks(run_job, 1, small(run_dir=tmp_path / "run"), fresh=True)
    for record in read_metrics(tmp_path / "run"):
        if record["kind"] == "step":
            assert record["gpu_ms_per_step"] > 0
            assert 0 < record["gpu_busy"] <= 1
            assert record["gpu_memory"] > 0
