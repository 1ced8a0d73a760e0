"""dataparallel/bench/variants.py: every variant is timed, and those with steps give the parts of their time."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from common.distributed.worker_group import WorkerGroup
from dataparallel.bench import __main__ as bench
from dataparallel.bench.config import MODES, DataParallelBenchConfig
from dataparallel.bench.variants import (
    HANDWRITTEN,
    ONE_DEVICE,
    PLAIN,
    PROCESSES,
    ReplicaWorker,
    build_variants,
)

CONFIG = DataParallelBenchConfig(devices="cpu,cpu", precision="bf16")


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerGroup]:
    with WorkerGroup(2, ReplicaWorker, CONFIG, threads=1) as group:
        yield group


@pytest.mark.parametrize("mode", MODES)
def test_every_variant_is_timed(mode: str, processes: WorkerGroup) -> None:
    threads = torch.get_num_threads()
    variants = build_variants(CONFIG, mode, 5, HANDWRITTEN, processes)  # 5: so that the parts of two devices differ
    assert set(variants) == {PLAIN, ONE_DEVICE, HANDWRITTEN, PROCESSES}
    results = {name: variant() for name, variant in variants.items()}
    assert all(seconds > 0 for seconds, _ in results.values())
    steps = ["scatter", "replicate", "forward", "gather"]
    if mode == "training":
        steps += ["loss", "backward", "reduce", "optimizer"]
    seconds, own = results[HANDWRITTEN]
    assert sorted(own) == sorted(steps)
    assert min(own.values()) > 0 and sum(own.values()) <= seconds
    assert torch.get_num_threads() == threads


def test_a_process_has_the_threads_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = mock.Mock(side_effect=RuntimeError)
    monkeypatch.setattr(bench, "WorkerGroup", ranks)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    with pytest.raises(RuntimeError):
        bench.measure(CONFIG)
    assert ranks.call_args.kwargs["threads"] == 3
