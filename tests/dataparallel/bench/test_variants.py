"""dataparallel/bench/variants.py: every variant does the same work."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from common.training.models import MODELS
from dataparallel.bench.processes import ReplicaProcesses
from dataparallel.bench.variants import (
    CLASSES,
    HANDWRITTEN,
    MODES,
    ONE_DEVICE,
    PLAIN,
    PROCESSES,
    SHAPES,
    TORCH,
    Comparison,
)

CPU = (torch.device("cpu"),) * 2


@pytest.mark.parametrize(
    "model", [name if name == "resnet18" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_processes_infer_what_the_plain_module_does(model: str) -> None:
    comparison = Comparison(model, CPU, "fp32")
    images = torch.randn(5, *SHAPES[model])
    with comparison.open_processes(8) as processes:
        logits, seconds = processes.infer(images)
        with torch.inference_mode():
            expected = comparison.build().eval()(images)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)  # a part of the batch sums in another order
        assert seconds > 0


def test_processes_take_the_plain_module_s_steps() -> None:
    comparison = Comparison("mlp", CPU, "fp32")
    plain = comparison.build()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9, fused=True)
    batches = [(torch.randn(5, 1, 28, 28), torch.randint(CLASSES, (5,))) for _ in range(3)]
    probe = torch.randn(4, 1, 28, 28)
    with comparison.open_processes(5) as processes:
        for images, labels in batches:  # of 5, so that the two parts differ
            processes.train(images, labels)
            F.cross_entropy(plain(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            torch.testing.assert_close(processes.infer(probe)[0], plain.eval()(probe), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def in_bf16() -> Iterator[tuple[Comparison, ReplicaProcesses]]:
    comparison = Comparison("fashion-cnn", CPU, "bf16")
    with comparison.open_processes(4) as processes:
        yield comparison, processes


@pytest.mark.parametrize("mode", MODES)
def test_every_variant_is_timed(mode: str, in_bf16: tuple[Comparison, ReplicaProcesses]) -> None:
    comparison, processes = in_bf16
    threads = torch.get_num_threads()
    variants = comparison.open(mode, 4, processes)
    assert {PLAIN, ONE_DEVICE, HANDWRITTEN, PROCESSES} <= set(variants) <= {
        PLAIN, ONE_DEVICE, TORCH, HANDWRITTEN, PROCESSES
    }  # fmt: skip
    assert all(variant() > 0 for variant in variants.values())
    steps = ["scatter", "replicate", "forward", "gather"]
    if mode == "training":
        steps += ["loss", "backward", "reduce", "optimizer"]
    (own,) = variants[HANDWRITTEN].steps
    assert sorted(own) == sorted(steps)
    assert all(seconds > 0 for seconds in own.values())
    assert list(variants[PROCESSES].steps[0]) == ["forward"]
    assert torch.get_num_threads() == threads


def test_a_process_has_the_threads_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = mock.Mock()
    monkeypatch.setattr("dataparallel.bench.processes.WorkerGroup", ranks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    Comparison("mlp", CPU, "fp32").open_processes(2)
    assert ranks.call_args.kwargs["threads"] == 3


def test_the_megabytes_are_the_model_s() -> None:
    comparison = Comparison("mlp", CPU, "fp32")
    parameters = copy.deepcopy(comparison.build()).parameters()
    assert comparison.megabytes == pytest.approx(4 * sum(p.numel() for p in parameters) / 1e6)
